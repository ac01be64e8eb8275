//! The text form of a schedule: PyTorch's CSV.
//!
//! Hazard: a file is written by hand or by another program, and a number in it may be anything. Guarantee: what is read has
//! all stages, each on one rank, and all microbatches; no allocation follows a number in the file; an error names the cell.
//!
//! Choices: whether the actions fit together is for [`Schedule::check`](super::Schedule::check) to say. Bubbles (empty
//! cells) are dropped, because the order alone decides what runs.

use std::cmp::Reverse;
use std::fmt;

use super::{Action, Op, Schedule, Step};

/// What follows an overlapped pair.
const OVERLAP: &str = "OVERLAP_F_B";
/// Most characters of a cell that an error repeats.
const SHOWN: usize = 40;

/// A cell of the file. Rows and columns count from 1, empty cells too; row 1 is rank 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    /// The row, from 1: the rank and 1.
    pub row: usize,
    /// The column, from 1.
    pub column: usize,
    /// What the file has there, at most 40 characters of it.
    pub text: String,
}

impl Cell {
    fn new(row: usize, column: usize, text: &str) -> Self {
        let mut shown = String::new();
        for (at, char) in text.chars().enumerate() {
            match char {
                _ if at == SHOWN => {
                    shown.push('…');
                    break;
                }
                char if char.is_control() => shown.extend(char.escape_default()),
                char => shown.push(char),
            }
        }
        let (row, column) = (row + 1, column + 1);
        Self {
            row,
            column,
            text: shown,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, column, text } = self;
        write!(f, "row {row}, column {column}: `{text}`")
    }
}

/// Why a text is not a schedule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// No cell holds an action of a microbatch.
    #[error("no action of a microbatch in the file; write one row for each rank, such as 0F0,0B0")]
    Empty,
    /// The text begins with U+FEFF, as some editors write it.
    #[error("the file begins with a byte order mark (U+FEFF); save it as UTF-8 without one")]
    ByteOrderMark,
    /// A cell cannot be read.
    #[error("{cell} {fault}")]
    Cell {
        /// The cell.
        cell: Cell,
        /// What is wrong with it.
        fault: CellFault,
    },
    /// A stage acts on two ranks.
    #[error("stage {stage} acts on two ranks, {first} and {second}; write its actions in one row")]
    TwoRanks {
        /// The stage.
        stage: u32,
        /// Its first action in the file.
        first: Cell,
        /// The first action in another row.
        second: Cell,
    },
    /// A stage below another one does not act.
    #[error(
        "stage {stage} is missing, but {largest} names a stage behind it; number stages from 0 without a gap"
    )]
    MissingStage {
        /// The first stage that is missing.
        stage: u32,
        /// An action of the last stage.
        largest: Cell,
    },
    /// A microbatch below another one is nowhere.
    #[error(
        "microbatch {microbatch} is missing, but {largest} names a later one; number microbatches from 0 without a gap"
    )]
    MissingMicrobatch {
        /// The first microbatch that is missing.
        microbatch: u32,
        /// An action of the last microbatch.
        largest: Cell,
    },
}

/// Says why a cell cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CellFault {
    /// It is no action.
    #[error(
        "is no action; write stage, action and microbatch, such as 2F0, where the action is F, I, W, B, SEND_F, RECV_F, \
         SEND_B, RECV_B, WAIT_SEND_F or WAIT_SEND_B; or 2UNSHARD, 2RESHARD, 2REDUCE_GRAD, 2WAIT_REDUCE_GRAD, or \
         (7F4;0B0)OVERLAP_F_B"
    )]
    Unreadable,
    /// A number is too large.
    #[error("has a number above {}", u32::MAX)]
    TooLarge,
    /// An action of a microbatch without its number.
    #[error("names no microbatch; write its number at the end")]
    NoMicrobatch,
    /// An action of a whole stage with the number of a microbatch.
    #[error("names a microbatch, but acts on the whole stage; remove the number at the end")]
    OfStage,
    /// The pair is something else than a forward and a backward of two stages.
    #[error(
        "overlaps something else than a forward and a backward of two stages; write the F first, then the B, such as (7F4;0B0)OVERLAP_F_B"
    )]
    NoPair,
}

impl Schedule {
    /// Reads PyTorch's CSV: a row for each rank, an action in each cell, with sends and receives or without.
    ///
    /// A stage runs on the rank in whose row it acts. Empty cells are bubbles and are dropped, as is whitespace around a
    /// cell. An empty row is a rank without work; rows without an action at the end are no ranks.
    ///
    /// # Errors
    /// A byte order mark; else the first cell that cannot be read; else a stage, then a microbatch that is missing; else a stage on two ranks.
    pub fn parse_csv(text: &str) -> Result<Self, ParseError> {
        if text.starts_with('\u{feff}') {
            return Err(ParseError::ByteOrderMark);
        }
        let mut ranks: Vec<Vec<Step>> = Vec::new();
        for (row, column, cell) in cells(text) {
            ranks.resize_with(ranks.len().max(row + 1), Vec::new);
            let step = parse_step(cell).map_err(|fault| ParseError::Cell {
                cell: Cell::new(row, column, cell),
                fault,
            })?;
            ranks[row].push(step);
        }
        let stages = count(&ranks, |action| Some(action.stage));
        let stages = stages.map_err(|(stage, last)| match last {
            None => ParseError::Empty,
            Some(last) => ParseError::MissingStage {
                stage,
                largest: cell_of(text, last),
            },
        })?;
        let microbatches = count(&ranks, Action::numbered);
        let microbatches = microbatches.map_err(|(microbatch, last)| match last {
            None => ParseError::Empty,
            Some(last) => ParseError::MissingMicrobatch {
                microbatch,
                largest: cell_of(text, last),
            },
        })?;
        Ok(Self {
            rank_of: place(text, &ranks, stages)?,
            ranks,
            microbatches,
        })
    }

    /// Writes PyTorch's CSV, a line for each rank. What [`parse_csv`](Self::parse_csv) or a builder made is read back equal.
    #[must_use]
    pub fn to_csv(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for steps in &self.ranks {
            let mut comma = "";
            for step in steps {
                write!(f, "{comma}{step}")?;
                comma = ",";
            }
            f.write_str("\n")?;
        }
        Ok(())
    }
}

/// The cells that are not empty, each with its row and column from 0.
fn cells(text: &str) -> impl Iterator<Item = (usize, usize, &str)> {
    text.lines().enumerate().flat_map(|(row, line)| {
        let cells = line.split(',').map(str::trim).enumerate();
        let cells = cells.filter(|(_, cell)| !cell.is_empty());
        cells.map(move |(column, cell)| (row, column, cell))
    })
}

/// The cell with the `index`-th step of the file.
fn cell_of(text: &str, index: usize) -> Cell {
    let (row, column, cell) = cells(text).nth(index).expect("it was read from there");
    Cell::new(row, column, cell)
}

/// All actions with their rank, and the number of their step in the file.
fn actions(ranks: &[Vec<Step>]) -> impl Iterator<Item = (usize, u32, Action)> {
    let ranks = (0..).zip(ranks);
    let steps = ranks.flat_map(|(rank, steps)| steps.iter().map(move |step| (rank, step)));
    let steps = steps.enumerate();
    steps.flat_map(|(index, (rank, step))| step.actions().map(move |action| (index, rank, action)))
}

/// How many of something there are, which are numbered from 0 without a gap.
///
/// # Errors
/// The first number that is missing, and the number of the step that has the largest.
fn count(
    ranks: &[Vec<Step>],
    number: impl Fn(Action) -> Option<u32>,
) -> Result<u32, (u32, Option<usize>)> {
    let numbers = || actions(ranks).filter_map(|(index, _, action)| Some((number(action)?, index)));
    let largest = numbers().max_by_key(|&(number, index)| (number, Reverse(index)));
    let Some((largest, index)) = largest else {
        return Err((0, None));
    };
    // Among n numbers one below n is missing if one is larger, so that a large number takes no memory.
    let mut seen = vec![false; numbers().count().min(largest as usize + 1)];
    for (number, _) in numbers() {
        if let Some(seen) = seen.get_mut(number as usize) {
            *seen = true;
        }
    }
    match seen.iter().position(|seen| !seen) {
        Some(missing) => Err((missing as u32, Some(index))),
        None => Ok(largest + 1),
    }
}

/// The rank of each stage.
fn place(text: &str, ranks: &[Vec<Step>], stages: u32) -> Result<Vec<u32>, ParseError> {
    let mut first_of = vec![None; stages as usize];
    for (index, rank, action) in actions(ranks) {
        let &mut (first, other) = first_of[action.stage as usize].get_or_insert((index, rank));
        if other != rank {
            return Err(ParseError::TwoRanks {
                stage: action.stage,
                first: cell_of(text, first),
                second: cell_of(text, index),
            });
        }
    }
    let ranks = first_of.into_iter().flatten();
    Ok(ranks.map(|(_, rank)| rank).collect())
}

fn parse_step(cell: &str) -> Result<Step, CellFault> {
    let Some(pair) = cell.strip_prefix('(') else {
        return parse_action(cell).map(Step::One);
    };
    let pair = pair.split_once(')').filter(|(_, op)| *op == OVERLAP);
    let (pair, _) = pair.ok_or(CellFault::Unreadable)?;
    let (forward, backward) = pair.split_once(';').ok_or(CellFault::NoPair)?;
    let forward = parse_action(forward.trim())?;
    let backward = parse_action(backward.trim())?;
    let ops = (forward.op, backward.op);
    if ops != (Op::Forward, Op::Backward) || forward.stage == backward.stage {
        return Err(CellFault::NoPair);
    }
    Ok(Step::Overlapped { forward, backward })
}

fn parse_action(cell: &str) -> Result<Action, CellFault> {
    let is_letter = |c: char| !c.is_ascii_digit();
    let (stage, rest) = cell.split_at(cell.find(is_letter).ok_or(CellFault::Unreadable)?);
    let name = rest.trim_end_matches(|c: char| c.is_ascii_digit());
    let microbatch = &rest[name.len()..];
    let op = Op::parse(name).filter(|_| !stage.is_empty());
    let op = op.ok_or(CellFault::Unreadable)?;
    let number = |digits: &str| digits.parse().map_err(|_| CellFault::TooLarge);
    let stage = number(stage)?;
    match (op.is_of_stage(), microbatch) {
        (true, "") => Ok(Action::new(stage, op, 0)),
        (true, _) => Err(CellFault::OfStage),
        (false, "") => Err(CellFault::NoMicrobatch),
        (false, microbatch) => Ok(Action::new(stage, op, number(microbatch)?)),
    }
}
