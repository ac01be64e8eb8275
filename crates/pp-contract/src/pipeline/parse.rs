//! The text of a pipeline, read from left to right, and the rules for the whole.

use core::str::FromStr;

use super::{Laps, MAX_RANKS, MAX_STAGES, Pipeline, PipelineError, Ring, StageSpec};
use crate::bounded::Text;
use crate::ids::Rank;

type Result<T> = core::result::Result<T, PipelineError>;

impl FromStr for Pipeline {
    type Err = PipelineError;

    fn from_str(text: &str) -> Result<Self> {
        let mut parser = Parser {
            text,
            ..Parser::default()
        };
        parser.pipeline()?;
        parser.check()?;
        let Parser {
            mut stages, rings, ..
        } = parser;
        for at in 0..stages.len() {
            let is_same = |other: &&Named| other.spec.name == stages[at].spec.name;
            let part = stages[..at].iter().filter(is_same).count();
            let parts = part + stages[at..].iter().filter(is_same).count();
            (stages[at].spec.part, stages[at].spec.parts) = (part, parts);
        }
        let mut stages: Vec<_> = stages.into_iter().map(|stage| stage.spec).collect();
        stages
            .last_mut()
            .expect("there are two stages at least")
            .is_sink = true;
        Ok(Self { stages, rings })
    }
}

/// A stage, and where its name begins.
struct Named {
    spec: StageSpec,
    position: usize,
}

#[derive(Default)]
struct Parser<'a> {
    text: &'a str,
    /// Bytes read so far.
    at: usize,
    stages: Vec<Named>,
    rings: Vec<Ring>,
}

fn error<T>(position: usize, problem: impl Into<String>) -> Result<T> {
    let problem = problem.into();
    Err(PipelineError { position, problem })
}

impl<'a> Parser<'a> {
    /// What is left, without the blanks before it.
    fn rest(&mut self) -> &'a str {
        let rest = self.text[self.at..].trim_start();
        self.at = self.text.len() - rest.len();
        rest
    }

    /// The next character, counted from 1. An error of one character names it.
    fn position(&mut self) -> usize {
        self.rest();
        self.text[..self.at].chars().count() + 1
    }

    fn skip(&mut self, token: &str) -> bool {
        let is_next = self.rest().starts_with(token);
        self.at += if is_next { token.len() } else { 0 };
        is_next
    }

    /// The longest run of characters of this kind, which may be empty.
    fn take(&mut self, is_of_it: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !is_of_it(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// What is wanted here, and what else there is to say of it.
    fn unexpected<T>(&mut self, wanted: &str, more: &str) -> Result<T> {
        let (position, rest) = (self.position(), self.rest());
        if rest == "-" {
            return error(
                position,
                "the text ends in '-'; quote it: the shell took the >",
            );
        }
        match rest.chars().next() {
            None => error(
                position,
                format!("the text ends; write {wanted} here{more}"),
            ),
            Some(found) => error(
                position,
                format!(
                    "found '{}'; write {wanted} here{more}",
                    found.escape_debug()
                ),
            ),
        }
    }

    fn pipeline(&mut self) -> Result<()> {
        loop {
            self.step()?;
            if self.rest().is_empty() {
                return Ok(());
            }
            self.arrow("'->' or ',' and the next stage")?;
        }
    }

    fn arrow(&mut self, wanted: &str) -> Result<()> {
        match self.skip("->") || self.skip(",") {
            true => Ok(()),
            false => self.unexpected(wanted, ""),
        }
    }

    /// One stage, or a ring of stages.
    fn step(&mut self) -> Result<()> {
        if !self.skip("(") {
            return self.stage("a stage", ", such as encode@0");
        }
        let first = self.stages.len();
        loop {
            if self.rest().starts_with('(') {
                return error(
                    self.position(),
                    "a ring stands in a ring; close the first one before it",
                );
            }
            self.stage("a stage of the ring", "")?;
            let Named { spec, position } = &self.stages[self.stages.len() - 1];
            if spec.ranks.len() > 1 {
                let name = &spec.name;
                return error(
                    *position,
                    format!(
                        "the group of {name} stands in a ring; give {name} one rank, or take it out of the ring"
                    ),
                );
            }
            if self.skip(")") {
                break;
            }
            self.arrow("'->', ',' or ')'")?;
        }
        let last = self.stages.len() - 1;
        if !self.skip("*") {
            return self.unexpected("'*steps', or '*' and the number of laps,", "");
        }
        let position = self.position();
        let laps = match self.take(|c| c.is_ascii_alphanumeric() || c == '_') {
            "steps" => Laps::Steps,
            "" => return self.unexpected("'steps' or the number of laps", ""),
            laps => match laps.parse() {
                Ok(laps @ 1..) => Laps::Fixed(laps),
                _ => {
                    return error(
                        position,
                        format!(
                            "a ring cannot be walked '{laps}' times; write 'steps', or a number from 1 to 65535"
                        ),
                    );
                }
            },
        };
        self.rings.push(Ring { first, last, laps });
        Ok(())
    }

    fn stage(&mut self, wanted: &str, example: &str) -> Result<()> {
        let position = self.position();
        let name = self.take(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
        if !name.starts_with(|c: char| c.is_ascii_lowercase()) {
            self.at -= name.len();
            let rule = format!("{example}; a name is of a-z, 0-9 and _, and begins with a letter");
            return self.unexpected(wanted, &rule);
        }
        if self.stages.len() == MAX_STAGES {
            return error(
                position,
                format!("{name} is one stage more than {MAX_STAGES}, the most; take stages out"),
            );
        }
        let Ok(spelled) = Text::try_from(name) else {
            return error(
                position,
                format!("the name {name} is over 32 bytes; shorten it"),
            );
        };
        if !self.skip("@") {
            return self.unexpected(&format!("'@' and the rank of {name}"), "");
        }
        let mut ranks = vec![self.rank()?];
        while self.skip("+") {
            let position = self.position();
            let rank = self.rank()?;
            if ranks.contains(&rank) {
                return error(
                    position,
                    format!("rank {rank} stands twice in the group of {name}; name each rank once"),
                );
            }
            ranks.push(rank);
        }
        let spec = StageSpec {
            name: spelled,
            part: 0,
            parts: 1,
            ranks,
            is_sink: false,
        };
        self.stages.push(Named { spec, position });
        Ok(())
    }

    fn rank(&mut self) -> Result<Rank> {
        let position = self.position();
        match self.take(|c| c.is_ascii_digit()) {
            "" => self.unexpected("a rank", ", such as 0"),
            digits => match digits.parse() {
                Ok(rank @ 0..MAX_RANKS) => Ok(Rank::new(rank)),
                _ => error(
                    position,
                    format!("rank {digits} is over {}, the largest", MAX_RANKS - 1),
                ),
            },
        }
    }

    /// The rules that need the whole text.
    fn check(&self) -> Result<()> {
        let last = self.stages.len() - 1;
        if last == 0 {
            let Named { spec, position } = &self.stages[0];
            return error(
                *position,
                format!(
                    "{} is the only stage; a pipeline has a source and a sink, such as encode@0 -> decode@0",
                    spec.name
                ),
            );
        }
        for (end, at) in [("source", 0), ("sink", last)] {
            let Named {
                spec: StageSpec { name, ranks, .. },
                position,
            } = &self.stages[at];
            let refuse = |problem: String| error(*position, problem);
            if ranks.len() > 1 {
                return refuse(format!(
                    "{name} is the {end} and stands on {} ranks; give it one rank",
                    ranks.len()
                ));
            }
            if self
                .rings
                .iter()
                .any(|ring| (ring.first..=ring.last).contains(&at))
            {
                return refuse(format!(
                    "{name} is the {end} and stands in a ring; take it out of the ring"
                ));
            }
            let others = self
                .stages
                .iter()
                .enumerate()
                .filter(|(other, _)| *other != at);
            if let Some((_, again)) = others
                .into_iter()
                .find(|(_, other)| other.spec.name == *name)
            {
                return error(
                    again.position,
                    format!("{name} is the {end} and stands here too; name this stage otherwise"),
                );
            }
        }
        let source = &self.stages[0];
        if source.spec.leader() != Rank::new(0) {
            let StageSpec { name, .. } = &source.spec;
            return error(
                source.position,
                format!(
                    "{name} is the source and stands on rank {}; the source stands on rank 0",
                    source.spec.leader()
                ),
            );
        }
        self.check_groups()?;
        let used = |rank: u32| {
            self.stages
                .iter()
                .find(|stage| stage.spec.ranks.contains(&Rank::new(rank)))
        };
        let Some((largest, stage)) = (0..MAX_RANKS)
            .rev()
            .find_map(|rank| Some((rank, used(rank)?)))
        else {
            return Ok(());
        };
        match (0..largest).find(|rank| used(*rank).is_none()) {
            Some(rank) => error(
                stage.position,
                format!(
                    "{} stands on rank {largest}, and rank {rank} has no stage; use all ranks from 0",
                    stage.spec.name
                ),
            ),
            None => Ok(()),
        }
    }

    /// The members of a group wait for each other. A rank in two groups could keep the members of one waiting while it waits
    /// for those of the other, which may wait for the first through their edges.
    fn check_groups(&self) -> Result<()> {
        let is_group = |stage: &&Named| stage.spec.ranks.len() > 1;
        let groups = || self.stages.iter().filter(is_group);
        for (at, Named { spec, position }) in groups().enumerate() {
            for Named { spec: other, .. } in groups().take(at) {
                let shared = spec.ranks.iter().find(|rank| other.ranks.contains(rank));
                if let Some(rank) = shared {
                    let [own, other] = [spec, other].map(StageSpec::with_ranks);
                    let problem = format!(
                        "rank {rank} is in the groups {other} and {own}, which could wait for each other for ever; give the \
                         stage {} one rank, or ranks of which none is in another group",
                        spec.name
                    );
                    return error(*position, problem);
                }
            }
        }
        Ok(())
    }
}
