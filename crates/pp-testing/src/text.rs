//! Texts of tests: arguments, reports, and what a process said.

use std::path::Path;

use serde_json::Value;

/// Splits a text at its blanks: into the arguments of a command, or the keys of a report.
pub fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Splits a table into its rows, one a line, and these into their cells, with `|` between blanks. A row that begins with
/// `//` is a comment.
///
/// # Panics
///
/// If a row has another number of cells.
#[track_caller]
pub fn rows<const N: usize>(table: &str) -> impl Iterator<Item = [&str; N]> {
    let lines = table.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with("//"));
    lines.map(|line| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        cells.try_into().unwrap_or_else(|_| panic!("{line}"))
    })
}

/// Fails unless each of these words is in the text.
#[track_caller]
pub fn assert_has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word:?} is not in: {text}");
    }
}

/// Reads the JSON value in a file.
#[track_caller]
pub fn read_json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}
