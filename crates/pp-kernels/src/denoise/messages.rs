//! What the leader of a group and the other members send each other around the passes of a call: one message each way.
//!
//! A member gets the tensors that the leader has, cut to the rows that it holds, as a payload of its own, and sends back
//! the tensor that its passes made.

use pp_contract::{DType, Manifest, TensorSpec};

use super::passes::Share;
use super::rows::{Move, RowShares};
use super::tensors::{Types, between, latents_dims, result};
use crate::config::ChunkShape;
use crate::error::Failure;

/// The messages of one call.
#[derive(Debug)]
pub(crate) struct Messages {
    /// Bytes that each member gets, and that it sends back. The leader, which has the payloads, needs none.
    pub(crate) parts: Vec<u64>,
    pub(crate) results: Vec<u64>,
    /// The tensors in them, of every member but the leader.
    lists: Vec<[Manifest; 2]>,
    /// Name and type of what the passes make.
    pub(crate) made: (&'static str, DType),
    frames: usize,
}

impl Messages {
    /// Those of a call.
    pub(crate) fn new(
        cut: &RowShares,
        (shape, share): (ChunkShape, &Share),
        types: Types,
    ) -> Result<Messages, Failure> {
        let (name, dtype) = result(share, types);
        let mut messages = Messages {
            parts: vec![0],
            results: vec![0],
            lists: Vec::new(),
            made: (name, dtype),
            frames: shape.frames as usize,
        };
        for (_, rows) in cut.followers() {
            let dims = latents_dims(&rows.geometry, shape.frames);
            let made = Manifest::new(&[TensorSpec::new(name, dtype, &dims)?])?;
            let part = between(&rows.geometry, shape, types, share.has_guide())?;
            messages.parts.push(part.payload_bytes());
            messages.results.push(made.payload_bytes());
            messages.lists.push([part, made]);
        }
        Ok(messages)
    }

    /// The tensors that a member but the leader gets, and those that it makes.
    pub(crate) fn of(&self, member: usize) -> &[Manifest; 2] {
        &self.lists[member - 1]
    }

    /// The copies that make the parts of all members, one behind the other: each from a tensor of the leader's `whole`.
    pub(crate) fn sent<'a>(
        &'a self,
        cut: &'a RowShares,
        whole: &'a Manifest,
    ) -> impl Iterator<Item = (&'a TensorSpec, Move)> {
        let mut start = 0;
        let members = cut.followers().zip(&self.lists);
        let moves = members.flat_map(move |((member, _), [part, _])| {
            let moves = cut.scattered(member, whole, part, start);
            start += part.payload_bytes() as usize;
            moves
        });
        moves.filter_map(|(name, one)| Some((whole.get(name)?.1, one)))
    }

    /// The copies that put the results of all members, one behind the other, into the leader's.
    pub(crate) fn got<'a>(&'a self, cut: &'a RowShares) -> impl Iterator<Item = Move> {
        let mut start = 0;
        let members = cut.followers().zip(&self.lists);
        members.flat_map(move |((member, _), [_, made])| {
            let moves = cut.gathered(member, self.frames, self.made.1, start);
            start += made.payload_bytes() as usize;
            moves
        })
    }
}
