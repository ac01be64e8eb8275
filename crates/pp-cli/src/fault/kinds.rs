//! The faults that can be made in a run, by name.

/// A fault that a hook makes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Break {
    /// The rank kills itself.
    Kill,
    /// The rank stops itself.
    Stop,
    /// Phase B sleeps in its stage.
    StallCompute,
}

/// Name, and the ranks on which it can happen, the usual one first.
const ALL: [(Break, &str, &[u32]); 3] = [
    (Break::Kill, "kill", &[1, 0]),
    (Break::Stop, "stop", &[1, 0]),
    (Break::StallCompute, "stall-compute", &[1]),
];

impl Break {
    pub(crate) fn named(id: &str) -> Option<Self> {
        let entry = ALL.iter().find(|(_, name, _)| *name == id);
        entry.map(|(what, ..)| *what)
    }

    fn entry(self) -> &'static (Self, &'static str, &'static [u32]) {
        let entry = ALL.iter().find(|(what, ..)| *what == self);
        entry.expect("the table has all of them")
    }

    pub(crate) fn id(self) -> &'static str {
        self.entry().1
    }

    /// The ranks on which it can happen, the usual one first.
    pub(crate) fn ranks(self) -> &'static [u32] {
        self.entry().2
    }
}
