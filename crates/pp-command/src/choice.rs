//! The choice of kernels and transport, as options say it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::ValueEnum;
use pp_kernels::KernelSet;
use pp_transport::gpu_backend::GpuTransport;

/// Where a stage gets its kernels.
#[derive(Clone, Debug)]
pub enum KernelChoice {
    /// The built-in set for the memory of the stage's rank.
    Auto,
    /// A built-in set.
    BuiltIn(Box<KernelSet>),
    /// A plugin.
    File(PathBuf),
}

impl KernelChoice {
    /// The file of a plugin.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match self {
            Self::File(path) => Some(path),
            _ => None,
        }
    }
}

impl FromStr for KernelChoice {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(match text {
            "auto" => Self::Auto,
            name => match KernelSet::named(name) {
                Some(set) => Self::BuiltIn(set.into()),
                None => Self::File(name.into()),
            },
        })
    }
}

/// Where all stages get their kernels: one choice for all, or one for each stage that is named, and `auto` for the others.
#[derive(Clone, Debug)]
pub struct KernelChoices {
    text: String,
    others: KernelChoice,
    named: Vec<(String, KernelChoice)>,
}

impl KernelChoices {
    /// The choice for the stage of this name.
    #[must_use]
    pub fn of(&self, stage: &str) -> &KernelChoice {
        let named = self.named.iter().find(|(name, _)| name == stage);
        named.map_or(&self.others, |(_, choice)| choice)
    }

    /// Each choice: that of the stages that are not named, and those of the others.
    pub fn iter(&self) -> impl Iterator<Item = &KernelChoice> + Clone {
        let named = self.named.iter().map(|(_, choice)| choice);
        std::iter::once(&self.others).chain(named)
    }

    /// Says whether a plugin is among them.
    #[must_use]
    pub fn has_plugin(&self) -> bool {
        self.iter().any(|choice| choice.file().is_some())
    }

    /// Says whether one of these stages has kernels that are built in.
    pub fn has_built_in<'a>(&self, mut stages: impl Iterator<Item = &'a str>) -> bool {
        stages.any(|stage| self.of(stage).file().is_none())
    }

    /// The stages that are named, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.named.iter().map(|(name, _)| &**name)
    }
}

/// As it was given.
impl fmt::Display for KernelChoices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// `auto`, `cpu`, `ptx` or the path of a plugin; or a list of `STAGE=` and one of these. In front of the first `=` of a path
/// stands a `/`, or it counts as such a list.
impl FromStr for KernelChoices {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_list = text
            .split_once('=')
            .is_some_and(|(name, _)| !name.contains('/'));
        if !is_list {
            let Ok(others) = text.parse();
            return Ok(Self {
                text: text.to_owned(),
                others,
                named: Vec::new(),
            });
        }
        let mut named: Vec<(String, KernelChoice)> = Vec::new();
        for entry in text.split(',') {
            match entry.split_once('=') {
                Some((name, choice)) if !name.is_empty() && !choice.is_empty() => {
                    if named.iter().any(|(other, _)| other == name) {
                        return Err(format!("it names {name} twice"));
                    }
                    let Ok(choice) = choice.parse();
                    named.push((name.to_owned(), choice));
                }
                _ => {
                    return Err(format!(
                        "{entry:?} is not STAGE=KERNELS, as encode=cpu is; a list names kernels for each stage that it has"
                    ));
                }
            }
        }
        Ok(Self {
            text: text.to_owned(),
            others: KernelChoice::Auto,
            named,
        })
    }
}

/// How payloads travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportChoice {
    /// GPU memory for ranks on GPUs, shared memory for ranks on CPUs. Between two GPUs it is p2p if NVLink connects them, else
    /// nccl. Prints the choice.
    Auto,
    /// Memory that the ranks of one machine share.
    Host,
    /// GPU memory, copied by the GPU's copy engine, on one machine; groups of ranks need NCCL.
    P2p,
    /// GPU memory over NCCL, on one machine or several.
    Nccl,
}

impl TransportChoice {
    /// The transports of GPUs, as advice names them.
    pub const OF_GPUS: &str = "p2p or nccl";

    /// Gives the way between GPUs, where payloads are to lie there, or may.
    #[must_use]
    pub fn way(self) -> Option<GpuTransport> {
        match self {
            Self::Auto => Some(GpuTransport::Best),
            Self::P2p => Some(GpuTransport::P2p),
            Self::Nccl => Some(GpuTransport::Nccl),
            Self::Host => None,
        }
    }

    /// Says whether payloads are to lie on GPUs, and nowhere else.
    #[must_use]
    pub fn is_on_gpus(self) -> bool {
        matches!(self, Self::P2p | Self::Nccl)
    }
}

/// As on the command line.
impl fmt::Display for TransportChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value();
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// Parses an argument for a plugin, `KEY=VALUE`.
///
/// # Errors
/// There is no key, or no `=`; in the words that follow the name of the option.
pub fn plugin_arg(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        _ => Err("it takes KEY=VALUE".into()),
    }
}
