//! Edges between a rank in host memory and a rank on a device: what the first computes with, and small traces written by
//! hand.

use std::cell::Cell;

use pp_testing::pattern;
use pp_transport::error::TransportError;
use pp_transport::host::{Host, RxLease, TxLease};

use crate::job::Computes;
use crate::lifetimes::Cut;
use crate::traces::{assert_each_breaks, judge, lines};
use pp_fakes::Fakes;

/// What a rank in host memory computes with. No call shows what it reads and writes, so it notes that.
#[derive(Default)]
pub(crate) struct OnHost {
    wrong: Cell<u64>,
}

fn note(what: &str, bytes: &[u8]) {
    let line = format!("{what}={:p}:{}", bytes.as_ptr(), bytes.len());
    Fakes::newest().load().note(&line);
}

fn write(slot: &mut TxLease, payload: &[u8]) {
    let slot = &mut slot.bytes_mut()[..payload.len()];
    note("HostWrite w", slot);
    slot.copy_from_slice(payload);
}

fn read(payload: &RxLease) -> Vec<u8> {
    note("HostRead r", payload.bytes());
    payload.bytes().to_vec()
}

impl Computes<Host> for OnHost {
    fn fill(&self, slot: &mut TxLease, bytes: usize, n: u64) -> Result<(), TransportError> {
        let payload: Vec<u8> = (0..bytes).map(|i| pattern(n, i)).collect();
        write(slot, &payload);
        Ok(())
    }

    fn check(&self, payload: &RxLease, n: u64) -> Result<(), TransportError> {
        let read = read(payload).into_iter().enumerate();
        let wrong = read.filter(|(i, byte)| *byte != pattern(n, *i)).count();
        self.wrong.set(self.wrong.get() + wrong as u64);
        Ok(())
    }

    fn copy(&self, from: &RxLease, to: &mut TxLease, _: u64) -> Result<(), TransportError> {
        write(to, &read(from));
        Ok(())
    }

    fn wrong(&self) -> u64 {
        self.wrong.get()
    }

    fn hold(&self, _: Cut) -> bool {
        false
    }

    fn wait_until_freed(&self, _: Cut) {}
}

/// The rank on a device sends: a copy behind the work, a header behind the copy; the credit that it sees gives the slot back.
fn from_device() -> Vec<String> {
    lines(
        "
        1 cuMemAlloc addr=0x1000 len=256 dev=0
        1 cuMemHostRegister addr=0x500000 len=8192 flags=3 file=1.77 from=0
        1 cuMemcpyDtoHAsync st=2 r=0x1000:256 w=0x501000:256 shared=1
        1 cuStreamQuery st=2 rc=0
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuMemcpyDtoHAsync st=2 r=0x1000:100 w=0x501000:100 shared=1
        1 cuEventRecord ev=2 st=2
        1 HostStore addr=0x500040 value=1
        1 cuEventQuery ev=2 rc=0
        1 HostStore addr=0x500000 value=88
        1 HostLoad addr=0x500040 value=0
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuMemcpyDtoHAsync st=2 r=0x1000:100 w=0x501000:100 shared=1
        1 cuEventRecord ev=2 st=2
        1 HostStore addr=0x500040 value=1
        1 cuEventQuery ev=2 rc=0
        1 HostStore addr=0x500000 value=176
        1 cuStreamQuery st=2 rc=0
        1 cuMemHostUnregister addr=0x500000 len=8192
        1 cuMemFree addr=0x1000 len=256 dev=0
    ",
    )
}

/// The rank in host memory receives: it reads the slot of a header, and gives it back.
fn to_host() -> Vec<String> {
    lines(
        "
        1 HostMap addr=0x700000 len=8192 file=1.77 from=0
        1 Mark name=run
        1 HostLoad addr=0x700000 value=88
        1 HostLoad addr=0x700040 value=1
        1 HostRead r=0x701000:100
        1 HostStore addr=0x700040 value=0
        1 HostLoad addr=0x700000 value=176
        1 HostLoad addr=0x700040 value=1
        1 HostRead r=0x701000:100
        1 HostStore addr=0x700040 value=0
        1 Mark name=end
    ",
    )
}

/// The rank in host memory sends: it fills a slot, hands it over, and fills it again when it has it back. The first word
/// that it reads stands for what the ranks tell each other when they have tried their edges.
fn from_host() -> Vec<String> {
    lines(
        "
        1 HostMap addr=0x700000 len=8192 file=1.77 from=0
        1 Mark name=run
        1 HostLoad addr=0x700080 value=9
        1 HostWrite w=0x701000:100
        1 HostStore addr=0x700040 value=1
        1 HostStore addr=0x700000 value=88
        1 HostLoad addr=0x700040 value=0
        1 HostWrite w=0x701000:100
        1 HostStore addr=0x700040 value=1
        1 HostStore addr=0x700000 value=176
        1 HostLoad addr=0x700040 value=0
        1 HostWrite w=0x701000:100
        1 Mark name=end
    ",
    )
}

/// The rank on a device receives: a copy behind the header, a reader behind the copy, the credit behind the reader.
fn to_device() -> Vec<String> {
    lines(
        "
        1 cuMemAlloc addr=0x1000 len=256 dev=0
        1 cuMemHostRegister addr=0x500000 len=8192 flags=3 file=1.77 from=0
        1 cuMemcpyHtoDAsync st=2 r=0x501000:256 w=0x1000:256 shared=1
        1 cuStreamQuery st=2 rc=0
        1 HostStore addr=0x500080 value=9
        1 HostLoad addr=0x500000 value=88
        1 HostLoad addr=0x500040 value=1
        1 cuMemcpyHtoDAsync st=2 r=0x501000:100 w=0x1000:100 shared=1
        1 cuEventRecord ev=2 st=2
        1 cuEventQuery ev=2 rc=0
        1 cuLaunchKernel st=1 r=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuEventQuery ev=1 rc=0
        1 HostStore addr=0x500040 value=0
        1 HostLoad addr=0x500000 value=176
        1 HostLoad addr=0x500040 value=1
        1 cuMemcpyHtoDAsync st=2 r=0x501000:100 w=0x1000:100 shared=1
        1 cuEventRecord ev=2 st=2
        1 cuEventQuery ev=2 rc=0
        1 cuLaunchKernel st=1 r=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuEventQuery ev=1 rc=0
        1 HostStore addr=0x500040 value=0
        1 cuStreamQuery st=2 rc=0
        1 cuMemHostUnregister addr=0x500000 len=8192
        1 cuMemFree addr=0x1000 len=256 dev=0
    ",
    )
}

#[test]
fn good_runs_beside_host_memory_are_accepted() {
    for ranks in [[from_device(), to_host()], [from_host(), to_device()]] {
        let report = judge(&ranks[0], &ranks[1]);
        report.assert_clean();
        // The copy that tries out the way is none.
        assert_eq!(report.transfers, 2);
        assert!(report.steady_lines >= 9);
    }
}

#[test]
fn a_change_of_a_copy_to_host_memory_breaks_its_rule_and_no_other() {
    let table = "
        // The copy does not wait for the work.
        Race | sender | cuStreamWaitEvent#0 =>
        // The header leaves before the copy was seen done, or when another one was.
        Race | sender | cuEventQuery#1 =>
        Race | sender | cuEventQuery#1 => 1 cuEventQuery ev=2 rc=600
        Race | sender | cuEventQuery#1 => 1 cuEventQuery ev=1 rc=0
        Race | sender | cuEventRecord ev=2#1 =>
        // The slot is read before its header, or given back before it was read.
        Race | receiver | HostLoad addr=0x700000 value=88#0 =>
        Race | receiver | HostRead#0 => | HostLoad addr=0x700000 value=176#0 << 1 HostRead r=0x701000:100
        // A copy into the slot does not wait for its credit, or takes one for two.
        Race | sender | HostLoad#0 =>
        Race | sender | HostLoad#0 => 1 HostLoad addr=0x500040 value=1
        // The work writes the slot of the device while it is copied out.
        Race | sender | cuEventQuery#0 => | HostStore addr=0x500000 value=88#0 => | HostLoad#0 =>
        // The slot is sent again without work, or read without a payload.
        Stale | sender | cuLaunchKernel#1 =>
        Unwritten | receiver | HostRead#0 => 1 HostRead r=0x701100:100
        // The pages are unlocked under a copy.
        Lifetime+ | sender | cuStreamQuery#1 => | cuEventQuery#1 => | cuMemFree#0 =>
        // Other bytes of the slot pass through the host.
        Steady | sender | HostLoad#0 << 1 cuMemcpyHtoDAsync st=1 r=0x9000:8 w=0x1040:8
    ";
    assert_each_breaks(judge, || [from_device(), to_host()], table);
}

#[test]
fn a_change_of_a_copy_from_host_memory_breaks_its_rule_and_no_other() {
    let table = "
        // The copy begins before its header has come.
        Race | receiver | HostLoad addr=0x500000 value=176#0 => | value=1#1 =>
        Race | receiver | HostLoad addr=0x500000 value=176#0 => 1 HostLoad addr=0x500000 value=88 | value=1#1 =>
        // The reader does not wait for the copy.
        Race | receiver | cuEventQuery ev=2#1 =>
        // The credit goes back before the copy is done, or before the last reader is.
        Race | receiver | value=0#0 => | cuEventQuery ev=2#0 << 1 HostStore addr=0x500040 value=0
        Race | receiver | value=0#1 => | cuEventQuery ev=2#1 << 1 HostStore addr=0x500040 value=0
        Race | receiver | cuEventQuery ev=1#0 =>
        Race | receiver | cuEventQuery ev=1#0 => 2 cuEventQuery ev=1 rc=0
        // The slot is written again without its credit, or before it was handed over.
        Race+ | sender | HostLoad#1 =>
        Race+ | sender | HostLoad#2 =>
        Race+ | sender | HostWrite#0 => | HostLoad#1 << 1 HostWrite w=0x701000:100
        // The same is sent again.
        Stale | sender | HostWrite#1 =>
        // The pages are unlocked under a copy.
        Lifetime+ | receiver | cuStreamQuery#1 => | cuEventQuery ev=2#1 => | cuMemFree#0 =>
    ";
    assert_each_breaks(judge, || [from_host(), to_device()], table);
}
