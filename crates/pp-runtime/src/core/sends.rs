//! The sends of an edge whose slots are not back.
//!
//! Hazard: in a fixed order a receiver may use a later message first, so the slot of a later send comes back while the
//! oldest is still read. A rank that looks at its oldest send alone never finds that slot, and waits for ever. Guarantee: a
//! rank that needs a slot finds each one that is back.
//!
//! Choices: in a stream slots come back in the order of the sends. So the oldest send is looked at first, and the others
//! only if no slot is free.

use std::collections::VecDeque;

/// Sends that are not known to be done, the oldest first. `H` is the handle of a send: dropping it frees the slot of one
/// that is done.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Sends<H>(VecDeque<H>);

impl<H> Default for Sends<H> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<H> Sends<H> {
    /// Adds a send, the newest.
    pub fn push(&mut self, send: H) {
        self.0.push_back(send);
    }

    /// Says whether all sends are done and seen to be.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes all sends out.
    pub fn drain(&mut self) -> impl Iterator<Item = H> {
        self.0.drain(..)
    }

    /// Drops the handles of sends that are done, and leases a slot with `try_lease`, if one is free.
    ///
    /// # Errors
    /// The first error of `is_done` or `try_lease`.
    pub fn lease<S, E>(
        &mut self,
        mut is_done: impl FnMut(&H) -> Result<bool, E>,
        mut try_lease: impl FnMut() -> Result<Option<S>, E>,
    ) -> Result<Option<S>, E> {
        while let Some(oldest) = self.0.front()
            && is_done(oldest)?
        {
            self.0.pop_front();
        }
        let (leased, open) = (try_lease()?, self.0.len());
        if leased.is_some() {
            return Ok(leased);
        }
        let mut at = 1;
        while let Some(send) = self.0.get(at) {
            match is_done(send)? {
                true => drop(self.0.remove(at)),
                false => at += 1,
            }
        }
        match self.0.len() < open {
            true => try_lease(),
            false => Ok(None),
        }
    }
}
