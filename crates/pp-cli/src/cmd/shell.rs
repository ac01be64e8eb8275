//! `pp completions` and `pp man`: what shells and manuals know of the command line.

use std::fs::create_dir_all;
use std::io::Write as _;
use std::path::Path;

use anyhow::Context as _;
use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use pp_command::print;
use pp_contract::FaultKind;
use pp_job::Error;
use pp_job::output::write_file;
use pp_runtime::stage::StageError;

use crate::args::{Cli, with_options};

/// Prints what a shell needs to complete commands and options of `pp`.
pub(crate) fn completions(shell: Shell) -> Result<(), Error> {
    let mut text = Vec::new();
    let mut command = shown(&with_options::<Cli>());
    clap_complete::generate(shell, &mut command, "pp", &mut text);
    print(&String::from_utf8_lossy(&text))
}

/// What a shell completes of a command: no user calls one that is hidden.
fn shown(command: &Command) -> Command {
    let below = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    // A name lives as long as the process.
    let name: &str = String::leak(command.get_name().to_owned());
    let bare = Command::new(name).about(command.get_about().cloned().unwrap_or_default());
    let bare = bare.args(command.get_arguments().cloned());
    bare.subcommands(below.map(shown))
}

/// Prints the page of `pp`, or writes a page for each command into a folder.
pub(crate) fn man(folder: Option<&Path>) -> Result<(), Error> {
    let mut command = with_options::<Cli>().disable_help_subcommand(true);
    command.build();
    let Some(folder) = folder else {
        return print(&String::from_utf8_lossy(&page(&command)?));
    };
    create_dir_all(folder).map_err(|error| StageError::file("write pages", folder, &error))?;
    write_pages(&command, folder)
}

fn write_pages(command: &Command, folder: &Path) -> Result<(), Error> {
    let shown = command
        .get_subcommands()
        .filter(|below| !below.is_hide_set());
    for below in shown {
        write_pages(below, folder)?;
    }
    let name = command.get_display_name().unwrap_or(command.get_name());
    let (path, page) = (folder.join(format!("{name}.1")), page(command)?);
    write_file(&path, |out| out.write_all(&page))
        .map_err(|error| Error::local(FaultKind::Io, "write pages", error))
}

fn page(command: &Command) -> Result<Vec<u8>, Error> {
    let mut page = Vec::new();
    let man = Man::new(command.clone());
    man.render(&mut page).context("cannot make the page")?;
    Ok(page)
}
