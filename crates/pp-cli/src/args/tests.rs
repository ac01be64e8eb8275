use super::*;

fn command() -> clap::Command {
    prepared::<Cli>()
}

/// The command at the end of `path`, and those below it, with their paths.
fn walk(path: &[String], command: &clap::Command, see: &mut impl FnMut(&[String], &clap::Arg)) {
    for arg in command
        .get_arguments()
        .filter(|arg| !arg.is_positional() && !arg.is_hide_set())
    {
        see(path, arg);
    }
    for below in command.get_subcommands() {
        let path = [path, &[below.get_name().to_owned()]].concat();
        walk(&path, below, see);
    }
}

#[test]
fn help_names_the_limits_and_the_default_of_every_number() {
    let mut numbers = 0;
    walk(&["pp".into()], &command(), &mut |path, arg| {
        let Some(flag) = arg.get_long().filter(|_| arg.get_action().takes_values()) else {
            return;
        };
        // These take no number.
        if ["pipeline", "plugin-arg", "output", "devices", "live"].contains(&flag) {
            return;
        }
        for value in ["x", "", "-1e30"] {
            let flag = format!("--{flag}");
            let line = [path, &[flag.clone(), value.into()]].concat();
            let Some(said) = command()
                .try_get_matches_from(line)
                .err()
                .and_then(|error| refusal(&error))
            else {
                return;
            };
            numbers += 1;
            let shown = if value.is_empty() { "\"\"" } else { value };
            assert!(
                said.starts_with(&format!("{flag} {shown}: it takes ")),
                "{said}"
            );
            let help = arg.get_help().unwrap().to_string();
            let (_, range) = said.rsplit_once("from ").expect("limits");
            let range = range.split(',').next().unwrap();
            assert!(help.contains(range), "{flag}: {range:?} is not in {help:?}");
            let has_default = !arg.get_default_values().is_empty();
            assert!(has_default || help.contains("by default"), "{flag}: {help}");
        }
    });
    assert!(numbers >= 60, "{numbers}");
}

#[test]
fn the_strength_reads_as_it_was_typed() {
    for text in ["auto", "10", "2.5"] {
        assert_eq!(text.parse::<Strength>().unwrap().to_string(), text);
    }
}
