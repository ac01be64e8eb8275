//! What the flight recorders of all ranks tell of their messages.

use std::sync::Mutex;

use pp_contract::{Generation, Prepared, Rank, Stamp};
use pp_runtime::driver::{Driven, RankRun};
use pp_testing::{Seat, TellPanic, local, seats};
use pp_transport::backend::End;
use pp_transport::edge::{EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::flight::{FlightRecorder, Kind, Message, Operation, State};
use pp_transport::host::{Host, HostGroup, HostLocal, HostRx, HostTx, RxLease, Sending, TxLease};
use pp_transport::in_flight::Rejected;

use super::stages::{SLOT, Seen, stages};
use super::world::options;
use super::{CHAIN, PAIR, SIX};

/// Edges over shared memory on which no message leaves at once.
struct Full;

impl Edges for Full {
    type Tx = TxLease;
    type Rx = RxLease;
    type Sending = Sending;
    type Receiving = <Host as Edges>::Receiving;
    type Out = FullTx;
    type In = HostRx;
    type Local = HostLocal;
    type Group = HostGroup;
}

/// An end that refuses each message twice.
struct FullTx(HostTx, u32);

impl EdgeTx for FullTx {
    type Tx = TxLease;
    type Sending = Sending;

    fn advance(&mut self) -> Result<bool, TransportError> {
        self.0.advance()
    }

    fn try_lease(&mut self) -> Result<Option<TxLease>, TransportError> {
        self.0.try_lease()
    }

    fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<TxLease>,
    ) -> Result<Sent<Sending>, Rejected<TxLease>> {
        self.1 += 1;
        if !self.1.is_multiple_of(3) {
            let peer = Rank::new(0);
            return Err(Rejected {
                buffer: payload,
                error: TransportError::Backpressure { peer },
            });
        }
        self.0.send(message, stamp, payload)
    }
}

/// Runs all ranks in generation 3, and gives what each recorded.
fn recorded(pipeline: &str) -> Vec<Vec<Operation>> {
    let (options, seen) = (options(pipeline, 2, 1), Mutex::new(Seen::default()));
    let seats = seats(&options, SLOT);
    let switches: Vec<_> = seats.iter().map(|seat| seat.switch.clone()).collect();
    let recorders: Vec<_> = seats.iter().map(|_| FlightRecorder::new(256)).collect();
    std::thread::scope(|scope| {
        let ranks = options.pipeline.world_size().ranks();
        for ((rank, Seat { switch, ends }), flight) in ranks.zip(seats).zip(&recorders) {
            let (mut options, seen, switches) = (options.clone(), &seen, &switches);
            options.flight = flight.clone();
            scope.spawn(move || {
                let _tell = TellPanic(switches);
                let own = stages(&options.pipeline, rank, &SIX, seen);
                let slots = |_, _| Ok(local(&options, SLOT));
                let run = RankRun::new(rank, own, options.clone(), slots);
                let mut run: RankRun<'_, Full, _> = run.unwrap();
                run.begin_attempt(3);
                for (number, end) in ends {
                    let end = match end {
                        End::Out(end) => End::Out(FullTx(end, 0)),
                        End::In(end) => End::In(end),
                    };
                    run.attach(number, end);
                }
                assert_eq!(run.drive(&switch), Ok(Driven::Finished));
            });
        }
    });
    let all = recorders.iter().map(|recorder| recorder.operations().0);
    all.collect()
}

/// What both ranks must have alike of a message, and the ranks.
fn common(rank: usize, operation: &Operation) -> String {
    let peer = operation.peer.unwrap().get() as usize;
    let ranks = match operation.kind {
        Kind::Send => (rank, peer),
        _ => (peer, rank),
    };
    let o = operation;
    let ids = (o.message, o.call_id, o.chunk_index, o.cache_epoch);
    format!("{ranks:?} {:?} {:?} {} {ids:?}", o.edge, o.number, o.bytes)
}

#[test]
fn each_message_is_one_operation_at_both_ends_also_where_it_was_tried_again() {
    for pipeline in [PAIR, CHAIN] {
        let all = recorded(pipeline);
        let of = |kind: Kind| {
            let ranks = all.iter().enumerate();
            let ranks = ranks.flat_map(|(rank, own)| own.iter().map(move |o| (rank, o)));
            let messages = ranks.filter(|(_, o)| o.kind == kind);
            let mut messages: Vec<String> = messages.map(|(rank, o)| common(rank, o)).collect();
            messages.sort();
            messages
        };
        let (sent, received) = (of(Kind::Send), of(Kind::Receive));
        assert_eq!(sent, received, "{pipeline}");
        // The chunks and a SHUTDOWN go over each edge, and no message is there twice.
        assert_eq!(sent.len(), all.len() * (SIX.len() + 1), "{pipeline}");
        assert!(sent.windows(2).all(|two| two[0] != two[1]), "{pipeline}");
        let edges = options(pipeline, 2, 1).pipeline;
        let edges: Vec<_> = edges.edges().collect();
        for operation in all.iter().flatten() {
            let edge = edges[operation.edge.unwrap() as usize];
            let peer = operation.peer.unwrap();
            assert_eq!(operation.kind == Kind::Send, edge.target == peer);
            assert_eq!(operation.kind == Kind::Receive, edge.source == peer);
            assert!(operation.is_over(), "{pipeline}: {operation:?}");
            assert_eq!(operation.generation, Generation::new(3));
            let is_bare = operation.message == Some(Message::Shutdown);
            assert!(!is_bare || (operation.state, operation.number) == (State::Done, None));
        }
    }
}

#[test]
fn a_send_that_is_kept_is_recorded_as_done() {
    for pipeline in [PAIR, CHAIN] {
        let all = recorded(pipeline);
        let sends = all[0].iter();
        let sends = sends.filter(|send| send.kind == Kind::Send && send.bytes > 0);
        let states: Vec<State> = sends.map(|send| send.state).collect();
        // That the last slot came back may be seen too late.
        assert_eq!(states[..SIX.len() - 1], [State::Done; SIX.len() - 1]);
    }
}
