//! Stages on the host made of closures. Between source and sink, `pp_runtime::stage::OnHost` is one.

use std::convert::Infallible;
use std::marker::PhantomData;

use pp_contract::{Manifest, Message, Plan};
use pp_runtime::stage::{
    Built, Chunk, Done, Offer, Place, Progress, Sink, Source, StageResult, Taken,
};
use pp_transport::host::{RxLease, TxLease};

use crate::{Toy, ToyParts};

/// A source made of closures.
#[derive(Debug)]
pub struct ToySource<O, B> {
    poll: O,
    build: B,
}

impl<P, O, B> ToySource<O, B>
where
    P: ToyParts,
    O: FnMut() -> Offer,
    B: FnMut(Place, &mut TxLease) -> Built<Toy<P>, ()>,
{
    /// A source that asks and builds with these.
    pub fn new(poll: O, build: B) -> Self {
        Self { poll, build }
    }
}

impl<P, O, B> Source<TxLease> for ToySource<O, B>
where
    P: ToyParts,
    O: FnMut() -> Offer,
    B: FnMut(Place, &mut TxLease) -> Built<Toy<P>, ()>,
{
    type Plan = Toy<P>;
    type Carry = ();

    fn poll(&mut self) -> StageResult<Offer> {
        Ok((self.poll)())
    }

    fn build(&mut self, place: Place, slot: &mut TxLease) -> StageResult<Built<Toy<P>, ()>> {
        Ok((self.build)(place, slot))
    }
}

/// A sink made of a closure, which gets the bytes of each chunk.
#[derive(Debug)]
pub struct ToySink<P, F>(F, PhantomData<P>);

impl<P, F> ToySink<P, F>
where
    P: Plan,
    F: FnMut(Chunk<'_, P>, &[u8]) -> StageResult<()>,
{
    /// A sink that takes with this.
    pub fn new(take: F) -> Self {
        Self(take, PhantomData)
    }
}

impl<P, F> Sink<RxLease> for ToySink<P, F>
where
    P: Plan,
    F: FnMut(Chunk<'_, P>, &[u8]) -> StageResult<()>,
{
    type Plan = P;
    type Kept = Infallible;

    fn take(
        &mut self,
        chunk: Chunk<'_, P>,
        input: Option<&RxLease>,
    ) -> StageResult<Progress<Taken, Infallible>> {
        let plan = chunk.message.plan();
        (self.0)(chunk, input.map_or(&[], RxLease::bytes))?;
        Ok(Progress::Done(Taken::of(plan, 1)))
    }
}

/// What a stage says of a chunk that it worked on as planned, with these tensors to go on.
pub fn done<P: Plan>(message: &Message<P>, tensors: Manifest) -> Done {
    Done {
        tensors,
        report: Taken::of(message.plan(), 1),
    }
}
