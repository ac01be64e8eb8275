//! The choice of kernels and transport, as options say it.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use pp_kernels::KernelSet;
use pp_transport::gpu_backend::GpuTransport;

/// Where stages get their kernels.
#[derive(Clone, Debug)]
pub enum KernelChoice {
    /// Those that go with the transport.
    Auto,
    /// A built-in set.
    BuiltIn(Box<KernelSet>),
    /// A plugin.
    File(PathBuf),
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

/// How payloads travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TransportChoice {
    /// GPU memory if --devices names GPUs or this machine has one for each rank, else shared memory. Between two GPUs it is p2p if NVLink connects
    /// them, else nccl. Prints the choice.
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
