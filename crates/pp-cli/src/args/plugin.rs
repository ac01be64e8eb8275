//! The command line of `pp plugin`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use pp_command::{plugin_arg, whole};
use pp_job::Error;

/// The commands of `pp plugin`.
#[derive(Debug, Subcommand)]
pub enum PluginCommand {
    /// Test a plugin against the ABI, in host memory and in GPU memory, as far as the plugin works there.
    ///
    /// Prints each check when it begins and when it ends. A child process loads the plugin and runs the
    /// checks; what the plugin prints goes to standard error. A check fails if the plugin crashes in it,
    /// calls exit, or takes longer than PP_STUCK_MS (120000; 0 for ever); the next check then begins in
    /// a new process. GPU memory is that of the first GPU (CUDA_VISIBLE_DEVICES). Without a GPU a plugin
    /// for both is checked in host memory alone, and the report says why.
    ///
    /// Exit code 0: every check passed. 5: a check failed. 10: the plugin works in GPU memory alone, and
    /// there is no GPU.
    Check(PluginArgs),
    /// The child process that loads a plugin for another command.
    #[command(hide = true)]
    Worker {
        /// The plugin, and what it is given.
        #[command(flatten)]
        args: PluginArgs,
        /// Run the checks too, from this one on.
        #[arg(long, value_name = "N", hide = true)]
        from: Option<usize>,
    },
}

/// The arguments of `pp plugin check`.
#[derive(Args, Clone, Debug)]
pub struct PluginArgs {
    /// The shared library.
    pub(crate) file: PathBuf,
    /// Width of the frames, 16 to 16384; by default that of the first of a few sizes that the plugin takes.
    #[arg(long, value_name = "N", requires = "height", value_parser = whole(16..=16384_u32))]
    pub(crate) width: Option<u32>,
    /// Height of the frames, 16 to 16384; by default that of the first of a few sizes that the plugin takes.
    #[arg(long, value_name = "N", requires = "width", value_parser = whole(16..=16384_u32))]
    pub(crate) height: Option<u32>,
    /// An argument for the plugin; may be given several times, each key once.
    #[arg(long = "plugin-arg", value_name = "KEY=VALUE", value_parser = plugin_arg)]
    pub(crate) plugin_args: Vec<(String, String)>,
    /// Print one JSON object at the end instead of text.
    #[arg(long)]
    pub(crate) json: bool,
}

/// Refuses two values of one key: a plugin would take either.
pub(crate) fn check_plugin_args(pairs: &[(String, String)]) -> Result<(), Error> {
    for (at, (key, value)) in pairs.iter().enumerate() {
        if let Some((_, first)) = pairs[..at].iter().find(|(other, _)| other == key) {
            return Err(Error::Usage(format!(
                "--plugin-arg {key}={value}: {key} is given twice, first as {first:?}; give each key once"
            )));
        }
    }
    Ok(())
}
