//! The operations of a group, for the recorder.

use pp_contract::{DType, Generation, Rank};

use super::operation::{Draft, Kind};
use super::recorder::{FlightRecorder, Record};

/// Numbers the operations of a group, so that the same operation can be found in the recordings of several ranks.
#[derive(Debug)]
#[doc(hidden)]
pub struct GroupLog {
    recorder: FlightRecorder,
    group: Option<u8>,
    generation: Generation,
    collectives: u64,
    /// Transfers to and from each member, by its place.
    sent: Vec<u64>,
    received: Vec<u64>,
}

impl GroupLog {
    pub fn new(
        recorder: &FlightRecorder,
        name: &str,
        members: &[Rank],
        generation: Generation,
    ) -> Self {
        Self {
            recorder: recorder.clone(),
            group: recorder.group(name, members),
            generation,
            collectives: 0,
            sent: vec![0; members.len()],
            received: vec![0; members.len()],
        }
    }

    /// Records that an operation is ready to be issued. `peer` is the place and rank of the other member, if there is
    /// one.
    pub fn begin(
        &mut self,
        kind: Kind,
        peer: Option<(usize, Rank)>,
        bytes: u64,
        dtype: DType,
    ) -> Record {
        let count = match (kind, peer) {
            (Kind::GroupSend, Some((place, _))) => self.sent.get_mut(place),
            (Kind::GroupReceive, Some((place, _))) => self.received.get_mut(place),
            _ => Some(&mut self.collectives),
        };
        let number = count.map(|count| {
            *count += 1;
            *count - 1
        });
        self.recorder.begin(&Draft {
            kind,
            group: self.group,
            peer: peer.map(|(_, rank)| rank),
            generation: self.generation,
            edge: None,
            number,
            bytes,
            dtype: Some(dtype),
            chunk: None,
        })
    }
}
