//! `--config`: a file that says what a long command line says.
//!
//! The file becomes options of the command line, in front of those that stand there. So there is one list of options, each
//! value goes through the parser of its option, and the ranks, which get this command line, do not read the file again.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use pp_job::Error;
use pp_runtime::stage::StageError;
use toml::{Table, Value};

/// The name of the option.
pub(super) const CONFIG: &str = "config";

/// How alike two names are where one may be the other, misspelt.
const NEAR: f64 = 0.5;

/// A command line with the options of a file in it.
pub(super) struct Expanded {
    /// The file.
    pub(super) file: PathBuf,
    /// All arguments, the name of the program first.
    pub(super) args: Vec<OsString>,
    /// The options of the file.
    from_file: Vec<String>,
}

impl Expanded {
    /// Says whether the option that a line begins with is one of the file.
    pub(super) fn has_option_of(&self, line: &str) -> bool {
        let is_it = |option: &String| {
            let name = option.split('=').next();
            name.is_some_and(|name| line.split(' ').next() == Some(name))
        };
        self.from_file.iter().any(is_it)
    }
}

/// Puts the options of the file that `--config` names into the command line. Gives `None` where no file is named, and where
/// the command line is to be refused as it stands.
///
/// # Errors
/// The file cannot be read, is no TOML, or has a key or a value that is no option of the command.
pub(super) fn expand(command: &Command, args: &[OsString]) -> Result<Option<Expanded>, Error> {
    let mut flags = (0..args.len()).take_while(|at| args[*at] != "--");
    let flag = format!("--{CONFIG}");
    let with_value = format!("{flag}=");
    let is_joined = |at: &usize| {
        args[*at]
            .as_encoded_bytes()
            .starts_with(with_value.as_bytes())
    };
    let Some(at) = flags.find(|at| args[*at] == *flag || is_joined(at)) else {
        return Ok(None);
    };
    if flags.any(|at| args[at] == *flag || is_joined(&at)) {
        return Ok(None);
    }
    let mut command = command.clone().ignore_errors(true);
    // It asks for the help or the version.
    let Ok(matches) = command.try_get_matches_from_mut(args) else {
        return Ok(None);
    };
    let (path, command, given) = leaf(&command, &matches);
    let Some(file) = given.try_get_one::<PathBuf>(CONFIG).ok().flatten() else {
        return Ok(None);
    };
    let from_file = options(file, command, given, &path.join(" "))?;
    let mut rest = args.to_vec();
    rest.drain(at..=at + usize::from(!is_joined(&at)));
    // Options stand behind the names of the command; an option in front of a name takes no value.
    let mut behind = 1;
    for name in &path[1..] {
        behind += 1 + rest[behind..]
            .iter()
            .take_while(|arg| **arg != **name)
            .count();
    }
    rest.splice(behind..behind, from_file.iter().map(OsString::from));
    Ok(Some(Expanded {
        file: file.clone(),
        args: rest,
        from_file,
    }))
}

/// The command that is meant, with its path and what it was given.
pub(super) fn leaf<'a>(
    command: &'a Command,
    matches: &'a ArgMatches,
) -> (Vec<&'a str>, &'a Command, &'a ArgMatches) {
    let (mut path, mut found) = (vec![command.get_name()], (command, matches));
    while let Some((name, given)) = found.1.subcommand()
        && let Some(below) = found.0.find_subcommand(name)
    {
        path.push(name);
        found = (below, given);
    }
    (path, found.0, found.1)
}

/// The options of a file that the command line leaves to it.
fn options(
    file: &Path,
    command: &Command,
    given: &ArgMatches,
    name: &str,
) -> Result<Vec<String>, Error> {
    let is_given =
        |arg: &&Arg| given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let on_line: Vec<&Arg> = command.get_arguments().filter(is_given).collect();
    let excludes = |one: &Arg, other: &Arg| {
        let mut all = command.get_arg_conflicts_with(one).into_iter();
        all.any(|arg| arg.get_id() == other.get_id())
    };
    let mut options = Vec::new();
    for (key, value) in &read(file)? {
        let refuse = |why: String| Error::Usage(format!("{}: {key}: {why}", file.display()));
        let known = known(command).find(|(long, _)| long == key);
        let (_, arg) = known.ok_or_else(|| refuse(unknown(key, command, name)))?;
        let all = as_options(key, arg, value).map_err(|why| refuse(why.into()))?;
        // What stands on the command line wins, over options that it excludes, too.
        let loses =
            |by: &&Arg| by.get_id() == arg.get_id() || excludes(arg, by) || excludes(by, arg);
        if !on_line.iter().any(loses) {
            options.extend(all);
        }
    }
    Ok(options)
}

/// The options that a file may give, by name.
fn known(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let named = command.get_arguments().filter(|arg| !arg.is_hide_set());
    let named = named.filter_map(|arg| Some((arg.get_long()?, arg)));
    named.filter(|(long, _)| ![CONFIG, "help", "version"].contains(long))
}

fn unknown(key: &str, command: &Command, name: &str) -> String {
    let alike = |long: &str| strsim::normalized_damerau_levenshtein(key, long);
    let all = known(command).map(|(long, _)| (alike(long), long));
    let nearest = all.max_by(|(one, _), (other, _)| one.total_cmp(other));
    match nearest.filter(|(alike, _)| *alike > NEAR) {
        Some((_, long)) => format!("no option of {name}; did you mean {long}?"),
        None => format!("no option of {name}; {name} --help lists them"),
    }
}

fn read(file: &Path) -> Result<Table, Error> {
    let name = file.display();
    let text = std::fs::read(file).map_err(|e| StageError::file("read config", file, &e))?;
    let text = String::from_utf8(text)
        .map_err(|_| Error::Usage(format!("{name}: the file is not UTF-8; save it as UTF-8")))?;
    text.parse::<Table>().map_err(|error| {
        let before = error.span().and_then(|span| text.get(..span.start));
        let line = before.map_or(0, |before| before.matches('\n').count()) + 1;
        let why = error.message().replace('\n', ", ");
        Error::Usage(format!("{name}: line {line} is no TOML: {why}"))
    })
}

/// The options that say what a value says.
fn as_options(key: &str, arg: &Arg, value: &Value) -> Result<Vec<String>, &'static str> {
    let times = match (arg.get_action(), value) {
        (ArgAction::SetTrue | ArgAction::Count, Value::Boolean(is_on)) => Some(usize::from(*is_on)),
        (ArgAction::SetTrue, _) => return Err("it takes true or false"),
        (ArgAction::Count, Value::Integer(times @ 0..=9)) => Some(*times as usize),
        (ArgAction::Count, _) => return Err("it takes true, false or a number of times up to 9"),
        _ => None,
    };
    if let Some(times) = times {
        return Ok(vec![format!("--{key}"); times]);
    }
    let texts: Option<Vec<String>> = match value {
        Value::Array(all) => all.iter().map(text).collect(),
        one => text(one).map(|text| vec![text]),
    };
    let texts = texts.ok_or("it takes a text, a number or a list of them")?;
    let texts = match (arg.get_value_delimiter(), arg.get_action()) {
        (Some(delimiter), _) => vec![texts.join(&delimiter.to_string())],
        (None, ArgAction::Append) => texts,
        _ if value.is_array() => return Err("it takes one value and no list"),
        _ => texts,
    };
    Ok(texts.iter().map(|text| format!("--{key}={text}")).collect())
}

fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Integer(number) => Some(number.to_string()),
        Value::Float(number) => Some(number.to_string()),
        _ => None,
    }
}
