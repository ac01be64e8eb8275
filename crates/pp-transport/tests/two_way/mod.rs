//! Two ranks of one process with an edge each way, as most tests want them.
#![allow(dead_code, reason = "each test crate uses its part")]

use std::time::{Duration, Instant};

use pp_contract::{Generation, Matched, Prepared, Rank, Stamp};
use pp_testing::{HANG, until};
use pp_transport::backend::{Abort, Backend, Connect, EdgeEnd, End, OnFrame, Peer};
use pp_transport::bell::Bell;
use pp_transport::edge::{EdgeRx, EdgeTx, Edges, Sent};
use pp_transport::error::TransportError;
use pp_transport::flight::FlightRecorder;
use pp_transport::host::{EdgeShape, Host};
use pp_transport::in_flight::{InFlight, Part, Rejected};

/// What a rank has: an edge to its peer, and one back.
pub(crate) struct TwoWay<B: Edges> {
    pub(crate) out: B::Out,
    pub(crate) incoming: B::In,
    bell: Bell,
}

impl<B: Edges> TwoWay<B> {
    pub(crate) fn new(out: B::Out, incoming: B::In, bell: Bell) -> Self {
        Self {
            out,
            incoming,
            bell,
        }
    }

    pub(crate) fn bell(&self) -> &Bell {
        &self.bell
    }

    pub(crate) fn try_lease(&mut self) -> Result<Option<B::Tx>, TransportError> {
        self.out.advance()?;
        self.out.try_lease()
    }

    pub(crate) fn send(
        &mut self,
        message: Prepared<'_>,
        stamp: Stamp,
        payload: Option<B::Tx>,
    ) -> Result<Sent<B::Sending>, Rejected<B::Tx>> {
        let sent = self.out.send(message, stamp, payload)?;
        // Both ranks may be of one thread: the header is to leave before the other one is asked for it.
        until(|| self.out.advance().unwrap_or(true));
        Ok(sent)
    }

    pub(crate) fn poll_frame(&mut self, inbox: &mut Vec<u8>) -> Result<bool, TransportError> {
        self.out.advance()?;
        self.incoming.poll_frame(inbox)
    }

    pub(crate) fn receive(
        &mut self,
        header: &Matched<'_>,
    ) -> Result<InFlight<B::Receiving>, TransportError> {
        self.incoming.receive(header)
    }
}

const LOW: Rank = Rank::new(0);
const HIGH: Rank = Rank::new(1);

fn bells() -> [Bell; 2] {
    [(); 2].map(|()| Bell::new().unwrap())
}

/// Both ranks on one host, the lower first.
pub(crate) fn on_host(up: EdgeShape, down: EdgeShape) -> (TwoWay<Host>, TwoWay<Host>) {
    let [low, high] = bells();
    let (up_tx, up_rx) = Host::pair(up, (LOW, &low), (HIGH, &high)).unwrap();
    let (down_tx, down_rx) = Host::pair(down, (HIGH, &high), (LOW, &low)).unwrap();
    (
        TwoWay::new(up_tx, down_rx, low),
        TwoWay::new(down_tx, up_rx, high),
    )
}

/// The ends of these edges before they are made, up and down.
pub(crate) fn edge_ends(up: EdgeShape, down: EdgeShape, is_lower: bool) -> [EdgeEnd; 2] {
    [(0, up, is_lower), (1, down, !is_lower)].map(|(edge, shape, is_sender)| EdgeEnd {
        edge,
        shape,
        is_sender,
    })
}

/// All of a payload, to the same place in another slot.
pub(crate) fn whole(bytes: u64) -> Part {
    Part {
        from: 0,
        to: 0,
        bytes,
    }
}

pub(crate) fn how<'a>(
    within: Duration,
    is_wanted: &'a dyn Fn() -> bool,
    recorder: &'a FlightRecorder,
) -> Connect<'a> {
    Connect {
        generation: Generation::new(0),
        deadline: Instant::now() + within,
        is_wanted,
        recorder,
    }
}

/// A rank that has agreed with its peer on an edge up and one down.
pub(crate) struct Met<B: Backend> {
    agreed: B::Agreed,
    bell: Bell,
    /// Where headers take the control channel.
    pub(crate) on_frame: Option<OnFrame>,
}

impl<B: Backend> Met<B> {
    pub(crate) fn new(backend: &mut B, peer: &mut dyn Peer, ends: [EdgeEnd; 2]) -> Self {
        let bell = Bell::new().unwrap();
        let (agreed, on_frame) = backend.agree(peer, &ends, &bell).unwrap();
        Self {
            agreed,
            bell,
            on_frame,
        }
    }

    /// Makes the edges, and what gives them up.
    pub(crate) fn connect(
        self,
        backend: &mut B,
        within: Duration,
        is_wanted: &dyn Fn() -> bool,
    ) -> Result<(TwoWay<B>, Abort), TransportError> {
        let recorder = FlightRecorder::off();
        let connected = backend.connect(self.agreed, how(within, is_wanted, &recorder))?;
        let abort = connected.abort.expect("it has payloads");
        Ok((both(connected.ends, self.bell), abort))
    }
}

/// The edge up and that down of a rank, as its backend makes them.
pub(crate) fn by_backend<B: Backend>(
    backend: &mut B,
    peer: &mut dyn Peer,
    ends: [EdgeEnd; 2],
) -> TwoWay<B> {
    let met = Met::new(backend, peer, ends);
    assert!(met.on_frame.is_none());
    let recorder = FlightRecorder::off();
    let connected = backend.connect(met.agreed, how(HANG, &|| true, &recorder));
    both(connected.unwrap().ends, met.bell)
}

/// The edge up and that down.
fn both<B: Edges>(ends: Vec<(u32, End<B>)>, bell: Bell) -> TwoWay<B> {
    let (mut out, mut incoming) = (None, None);
    for (_, end) in ends {
        match end {
            End::Out(end) => out = Some(end),
            End::In(end) => incoming = Some(end),
        }
    }
    TwoWay::new(out.unwrap(), incoming.unwrap(), bell)
}
