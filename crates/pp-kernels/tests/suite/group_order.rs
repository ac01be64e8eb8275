//! The streams of a group, on a driver that is not real: whatever two of them do with the same memory is ordered.

use pp_fakes::check::{Expect, Fresh, Recording, check};
use pp_fakes::ok;
use pp_fakes::raw::device;
use pp_kernels::KernelSet;
use pp_kernels::check::{CHECKS, Subject};

use crate::recorded;

#[test]
fn the_streams_of_a_group_are_ordered() {
    if !pp_testing::alone!() {
        return;
    }
    let (_, records) = recorded("group-order-records");

    let (context, stream) = device(0);
    let set = KernelSet::for_device();
    // SAFETY: the context is current on this thread, and lives as long as the process, with its stream.
    let subject = unsafe { Subject::on_device(&set, context as u64, stream as u64) };
    let subject = subject.expect("the context is current");
    let groups = CHECKS.iter().find(|check| check.name().contains("group"));
    assert_eq!(
        groups.map(|check| check.run(&subject)),
        Some(Ok("ok".into()))
    );
    ok!(stream_synchronize(stream));

    let expect = Expect {
        warm_up: usize::MAX,
        fresh: Fresh::WithGaps,
        ..Expect::default()
    };
    check(&Recording::read_all(records.path()), expect).assert_clean();
}
