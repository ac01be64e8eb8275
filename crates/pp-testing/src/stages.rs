//! Stages on the host made of closures.

use std::convert::Infallible;
use std::marker::PhantomData;

use pp_contract::{ChunkIndex, Envelope, Outcome, Plan};
use pp_runtime::stage::{
    Built, Computed, Decoded, FrontStages, Offer, PhaseBStages, Place, Progress, StageError,
};
use pp_transport::host::{RxLease, TxLease};

use crate::{Toy, ToyParts};

/// A front made of closures.
#[derive(Debug)]
pub struct ToyFront<S, B, D> {
    poll_source: S,
    build: B,
    decode: D,
}

impl<S, B, D> ToyFront<S, B, D>
where
    S: FnMut() -> Offer,
    B: FnMut(&mut TxLease) -> Envelope<Toy>,
    D: FnMut(Option<RxLease>),
{
    /// A front that asks, builds and decodes with these.
    pub fn new(poll_source: S, build: B, decode: D) -> Self {
        Self {
            poll_source,
            build,
            decode,
        }
    }
}

impl<S, B, D> FrontStages<TxLease, RxLease> for ToyFront<S, B, D>
where
    S: FnMut() -> Offer,
    B: FnMut(&mut TxLease) -> Envelope<Toy>,
    D: FnMut(Option<RxLease>),
{
    type Plan = Toy;
    type Carry = ();
    type Decoding = Infallible;

    fn poll_source(&mut self) -> Result<Offer, StageError> {
        Ok((self.poll_source)())
    }

    fn build(&mut self, _: Place, slot: &mut TxLease) -> Result<Built<Toy, ()>, StageError> {
        Ok(Built::new((self.build)(slot), ()))
    }

    fn decode(
        &mut self,
        _: ChunkIndex,
        (): (),
        _: &Outcome,
        payload: Option<RxLease>,
    ) -> Result<Progress<Decoded, Infallible>, StageError> {
        (self.decode)(payload);
        Ok(Progress::Done(Decoded::default()))
    }
}

/// A Phase B made of a closure.
#[derive(Debug)]
pub struct ToyPhaseB<P, F> {
    compute: F,
    parts: PhantomData<P>,
}

impl<P, F> ToyPhaseB<P, F>
where
    F: FnMut(
        Place,
        &Envelope<Toy<P>>,
        Option<&RxLease>,
        &mut TxLease,
    ) -> Result<Progress<Computed, Infallible>, StageError>,
{
    /// A Phase B that computes with this.
    pub fn new(compute: F) -> Self {
        let parts = PhantomData;
        Self { compute, parts }
    }
}

impl<P, F> PhaseBStages<TxLease, RxLease> for ToyPhaseB<P, F>
where
    P: ToyParts,
    F: FnMut(
        Place,
        &Envelope<Toy<P>>,
        Option<&RxLease>,
        &mut TxLease,
    ) -> Result<Progress<Computed, Infallible>, StageError>,
{
    type Plan = Toy<P>;
    type Computing = Infallible;

    fn compute(
        &mut self,
        place: Place,
        envelope: &Envelope<Toy<P>>,
        input: Option<&RxLease>,
        output: &mut TxLease,
    ) -> Result<Progress<Computed, Infallible>, StageError> {
        (self.compute)(place, envelope, input, output)
    }
}

/// What Phase B says of a chunk that it computed as planned.
pub fn computed(plan: &impl Plan) -> Computed {
    Computed {
        observed_calls: plan.expected_calls(),
        start_frame: plan.start_frame(),
        seal: None,
        worked: None,
    }
}
