//! Groups in host memory.

use pp_contract::{DType, FaultKind};
use pp_testing::assert_has;
use pp_transport::backend::Backend;
use pp_transport::flight::{FlightRecorder, Kind, State};
use pp_transport::group::Members;
use pp_transport::host::Host;
use pp_transport::launch::Via;

use super::{Instant, each, join, ranks};

#[test]
fn ranks_of_one_host_make_a_group_and_use_it() {
    for members in 1..=4 {
        each(members, Via::Unix, |at, wires| {
            let recorder = FlightRecorder::new(16);
            let mut joined = join(&mut Host, at, members, wires, &recorder).unwrap();
            let group = &mut joined.group;
            assert_eq!(group.members().own_place(), at);
            let mut data = (at as i32 + 1).to_le_bytes();
            group.all_reduce_sum(&mut data, DType::I32).unwrap();
            let sum = (1..=members as i32).sum::<i32>();
            assert_eq!(i32::from_le_bytes(data), sum);
            let mut data = [at as u8; 3];
            group.broadcast(&mut data, 0).unwrap();
            assert_eq!(data, [0; 3]);
            group.barrier().unwrap();

            // What was done is in the recording, with the group as all members know it.
            let groups = recorder.groups();
            assert_eq!(groups.len(), 1);
            assert_eq!(*groups[0].members, *ranks(members));
            let (operations, _) = recorder.operations();
            let kinds: Vec<_> = operations.iter().map(|o| (o.kind, o.number)).collect();
            let wanted = [Kind::AllReduce, Kind::Broadcast, Kind::Barrier];
            let wanted: Vec<_> = wanted.into_iter().zip((0..).map(Some)).collect();
            assert_eq!(kinds, wanted);
            assert!(operations.iter().all(|o| o.state == State::Done));
            assert_eq!(operations[1].peer, Some(ranks(members)[0]));
        });
    }
}

#[test]
fn an_abort_of_one_rank_reaches_the_other() {
    let ended = each(2, Via::Unix, |at, wires| {
        let mut joined = join(&mut Host, at, 2, wires, &FlightRecorder::off()).unwrap();
        if at == 0 {
            return joined.group.barrier().unwrap_err().to_string();
        }
        (joined.abort)("the watchdog says so", Instant::now()).unwrap();
        joined.group.barrier().unwrap_err().to_string()
    });
    for error in ended {
        assert_has(
            &error,
            &["phase_b of ranks 7+1 was aborted: the watchdog says so"],
        );
    }
}

#[test]
fn ranks_of_different_hosts_are_refused() {
    each(2, Via::Tcp, |at, mut wires| {
        let ranks = ranks(2);
        let members = Members::new("phase_b", &ranks, ranks[at]).unwrap();
        let fault = Host.agree_on_group(&members, &mut wires).unwrap_err();
        assert_eq!(fault.kind, FaultKind::HandshakeMismatch);
        assert_eq!(fault.rank, ranks[1 - at]);
    });
}
