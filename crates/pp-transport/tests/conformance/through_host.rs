//! Edges between a GPU and host memory. Both ends are on GPUs here, and each takes the other one to be in host memory.

use std::time::Instant;

use pp_testing::{HANG, until, wait_for};
use pp_transport::edge::EdgeTx as _;
use pp_transport::gpu_backend::GpuBackend;

use crate::devices::{Gate, Held, the_fakes};
use crate::edges_support::Peer;
use crate::gpu_link::{Mover, edge, ends, on_device, on_one_host, stream, write_slowly};

struct ThroughHost;

impl Mover for ThroughHost {
    type Edges = GpuBackend;
    const RECEIVES_WAIT: bool = false;

    fn backends(held: &mut Held) -> &mut [GpuBackend; 2] {
        &mut held.p2p
    }

    fn peers() -> [Peer; 2] {
        on_one_host().map(|peer| peer.beside(false))
    }
}

crate::gpu_suite::conformance_on_gpus!(ThroughHost);

/// One that was sent ahead, too; and a header without payload does not overtake it.
#[test]
fn a_header_leaves_behind_its_payload() {
    let fakes = the_fakes!();
    for is_ahead in [false, true] {
        let mut ends = ends::<ThroughHost>(edge(1, 64));
        let gate = Gate::closed(fakes);
        let mut lease = ends[0].lease();
        write_slowly(&mut lease, &stream(0), &on_device(0), u64::MAX);
        if is_ahead {
            lease.send_ahead(64).unwrap();
        }
        let flight = ends[0].commit(64, Some(lease));
        drop(ends[0].commit(0, None));
        assert!(!ends[0].link.out.advance().unwrap() && !ends[1].hear());
        drop(gate);
        until(|| ends[0].link.out.advance().unwrap());
        drop(wait_for(ends[1].hear_one().1));
        until(|| ends[1].link.poll_frame(&mut Vec::new()).unwrap());
        until(|| flight.as_ref().unwrap().is_done().unwrap());
    }
}

/// Nobody may use the payloads that they announce.
#[test]
fn headers_that_wait_are_dropped_by_an_abort() {
    let fakes = the_fakes!();
    let mut ends = ends::<ThroughHost>(edge(1, 64));
    let gate = Gate::closed(fakes);
    let mut lease = ends[0].lease();
    write_slowly(&mut lease, &stream(0), &on_device(0), u64::MAX);
    let flight = ends[0].commit(64, Some(lease)).unwrap();
    (ends[0].abort)("the test", Instant::now() + HANG).unwrap();
    assert!(ends[0].link.out.advance().is_err() && flight.is_done().is_err());
    drop(gate);
    let [zero, mut one] = ends;
    drop((zero, flight.abort()));
    assert!(!one.hear(), "a header came after the abort");
}
