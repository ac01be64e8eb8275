//! Which way two ranks on GPUs take, and what they say where one of the ways is not there. On the fakes.

use std::thread;

use pp_contract::{Fault, FaultKind};
use pp_device::Device;
use pp_testing::edge;
use pp_testing::rows;
use pp_transport::backend::{Backend, EdgeEnd};
use pp_transport::bell::Bell;
use pp_transport::launch::Via;

use pp_fakes::Fakes;

use crate::edges_support::{AnyGpu, Host, Kind, Meeting, P2pGpu, Peer, SAID, turn};

fn ends(is_sender: bool) -> [EdgeEnd; 2] {
    [(4, is_sender), (5, !is_sender)].map(|(number, is_sender)| EdgeEnd {
        edge: number,
        shape: edge(2, 10_000),
        is_sender,
    })
}

/// What two ranks agree on: the name of what carries the payloads at each, or why not.
fn agree<Zero: Kind, One: Kind>(via: Via) -> [Result<&'static str, Fault>; 2] {
    fn work<K: Kind>(mut peer: Peer, ends: [EdgeEnd; 2]) -> Result<&'static str, Fault> {
        let (_memory, mut backend) = K::rank(pp_transport::backend::Peer::own_rank(&peer).get());
        let bell = Bell::new().unwrap();
        backend.agree(&mut peer, &ends, &bell)?;
        Ok(backend.capabilities().name)
    }
    SAID.lock().unwrap().clear();
    let [zero, one] = Meeting::of_two(via);
    let (zero, one) = (
        zero.beside(One::IS_ON_DEVICE),
        one.beside(Zero::IS_ON_DEVICE),
    );
    thread::scope(|scope| {
        let one = scope.spawn(|| work::<One>(one, ends(false)));
        [work::<Zero>(zero, ends(true)), one.join().unwrap()]
    })
}

/// With settings of the fakes, which are taken back.
fn with<R>(settings: &[(&str, &str)], act: impl FnOnce() -> R) -> R {
    let fakes = Fakes::newest().load();
    settings
        .iter()
        .for_each(|(name, value)| fakes.set(name, value));
    let done = act();
    for (name, value) in [("PEERS", "nvlink"), ("DESCRIPTORS", "1"), ("FAULTS", "")] {
        fakes.set(name, value);
    }
    // A fault that is planned again counts anew if a call has come between.
    Device::open(0).unwrap().memory().unwrap();
    done
}

#[test]
fn the_best_way_is_taken_and_said() {
    let _turn = turn();
    let names = agree::<AnyGpu, AnyGpu>(Via::Unix).map(Result::unwrap);
    assert_eq!(names, ["p2p"; 2]);
    assert_eq!(
        *SAID.lock().unwrap(),
        ["edges between ranks: 0 -> 1 p2p, 1 -> 0 p2p"]
    );
}

/// Rank 0 is on a GPU: it sends two slots, which takes four copies to the device, and then it receives two.
#[test]
fn where_a_gpu_cannot_reach_host_memory_both_ranks_know_why() {
    let _turn = turn();
    let names = agree::<AnyGpu, Host>(Via::Unix).map(Result::unwrap);
    assert_eq!(names, ["host"; 2]);
    for [setting, via, why] in rows(
        "
        - | Tcp | share no memory
        FAULTS=cuMemHostRegister:1:2 | Unix | bytes of shared memory cannot be page-locked: cuMemHostRegister
        FAULTS=cuMemcpyDtoHAsync:2:999 | Unix | cuMemcpyDtoHAsync
        // Copies that are left out: from the GPU, and to it.
        FAULTS=cuMemcpyDtoHAsync:1:skip | Unix | rank 1: byte 0 of slot 0 of edge 4 is not what was sent
        FAULTS=cuMemcpyHtoDAsync:6:skip | Unix | rank 0: byte 0 of slot 1 of edge 5 is not what was sent
    ",
    ) {
        let via = if via == "Tcp" { Via::Tcp } else { Via::Unix };
        let setting = setting.split_once('=');
        let faults = with(setting.as_slice(), || agree::<AnyGpu, Host>(via));
        for fault in faults.map(Result::unwrap_err) {
            let text = fault.to_string();
            assert!(text.contains(why) && !text.contains('\n'), "{text}");
        }
    }
}

/// Both ranks know why, on one line: `p2p` is refused, and otherwise NCCL is taken.
#[test]
fn where_there_is_no_way_by_copy_engine_both_ranks_know_why() {
    let _turn = turn();
    for [setting, via, why] in rows(
        "
        - | Tcp | share no host
        PEERS=none | Unix | cannot reach the memory
        DESCRIPTORS=0 | Unix | cannot pass the memory
        FAULTS=cuMemCreate:1:2 | Unix | OUT_OF_MEMORY
        FAULTS=cuMemExportToShareableHandle:2:801 | Unix | cuMemExportToShareableHandle
        FAULTS=cuMemImportFromShareableHandle:1:999 | Unix | cuMemImportFromShareableHandle
        FAULTS=cuMemMap:2:1 | Unix | cuMemMap
        FAULTS=cuMemSetAccess:3:101 | Unix | cuMemSetAccess
        FAULTS=cuMemHostRegister:1:2 | Unix | cuMemHostRegister
        FAULTS=cuStreamWriteValue32:1:801 | Unix | cuStreamWriteValue32
        // A copy that is left out, and its number comes.
        FAULTS=cuMemcpyDtoDAsync:2:skip | Unix | is not what was sent
    ",
    ) {
        let via = if via == "Tcp" { Via::Tcp } else { Via::Unix };
        let setting = setting.split_once('=');
        let settings = setting.as_slice();
        let faults = with(settings, || agree::<P2pGpu, P2pGpu>(via));
        for fault in faults.map(Result::unwrap_err) {
            assert_eq!(fault.kind, FaultKind::Device, "{fault}");
            let text = fault.to_string();
            assert!(text.contains(why) && !text.contains('\n'), "{text}");
            assert!(text.contains("use --transport auto or nccl"), "{text}");
        }
        let names = with(settings, || agree::<AnyGpu, AnyGpu>(via)).map(Result::unwrap);
        assert_eq!(names, ["nccl"; 2], "{why}");
        let said = SAID.lock().unwrap().clone();
        assert!(
            said.len() == 1
                && said[0].starts_with("edges between ranks: 0 -> 1 nccl, 1 -> 0 nccl (")
                && said[0].contains(why),
            "{said:?}"
        );
    }
}

/// Until it was measured, the bus is taken only where it was asked for.
#[test]
fn the_bus_is_taken_where_it_was_asked_for() {
    let _turn = turn();
    let pcie = &[("PEERS", "pcie")];
    let names = with(pcie, || agree::<P2pGpu, P2pGpu>(Via::Unix)).map(Result::unwrap);
    assert_eq!(names, ["p2p"; 2]);
    let names = with(pcie, || agree::<AnyGpu, AnyGpu>(Via::Unix)).map(Result::unwrap);
    assert_eq!(names, ["nccl"; 2]);
    let said = SAID.lock().unwrap().clone();
    assert!(said[0].contains("not connected by NVLink"), "{said:?}");
}
