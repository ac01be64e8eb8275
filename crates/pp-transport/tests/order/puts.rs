//! Small traces written by hand: copies into a slot of another process, numbers behind them, and credits that go back.

use crate::traces::{
    EXPECT, assert_each_breaks, assert_only, at, judge, judge_as, lines, recording,
};
use pp_fakes::check::{Expect, Fresh, Rule, check};

/// The sender: fills its own slot, copies it into the receiver's, and lets a number follow; the credit that it sees
/// gives both slots back.
fn sender() -> Vec<String> {
    lines(
        "
        1 cuMemAlloc addr=0x1000 len=256 dev=0
        1 cuMemMap addr=0x8000 len=4096 mem=9.1 peer=1
        1 cuMemHostRegister addr=0x500000 len=4096 flags=3 file=1.77 from=0
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuMemcpyDtoDAsync st=2 r=0x1000:100 w=0x8100:100 peer=1
        1 cuStreamWriteValue32 st=2 addr=0x500000 value=1 flags=0
        1 HostLoad addr=0x500080 value=1
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuMemcpyDtoDAsync st=2 r=0x1000:100 w=0x8100:100 peer=1
        1 cuStreamWriteValue32 st=2 addr=0x500000 value=2 flags=0
        1 HostLoad addr=0x500080 value=2
        1 cuStreamQuery st=2 rc=0
        1 cuMemHostUnregister addr=0x500000 len=4096
        1 cuMemUnmap addr=0x8000 len=4096
        1 cuMemFree addr=0x1000 len=256 dev=0
    ",
    )
}

/// The receiver: its stage reads the slot once the host has seen the number, and a stream of its own gives the slot back.
fn receiver() -> Vec<String> {
    lines(
        "
        1 cuMemMap addr=0x3000 len=4096 mem=9.1 peer=0
        1 cuMemHostRegister addr=0x700000 len=4096 flags=3 file=1.77 from=0
        1 Mark name=run
        1 HostLoad addr=0x700000 value=1
        1 cuLaunchKernel st=1 r=0x3100:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuStreamWriteValue32 st=2 addr=0x700080 value=1 flags=0
        1 HostLoad addr=0x700000 value=2
        1 cuLaunchKernel st=1 r=0x3100:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 cuStreamWriteValue32 st=2 addr=0x700080 value=2 flags=0
        1 Mark name=end
        1 cuStreamQuery st=2 rc=0
        1 cuMemHostUnregister addr=0x700000 len=4096
        1 cuMemUnmap addr=0x3000 len=4096
    ",
    )
}

#[test]
fn a_good_run_of_puts_is_accepted() {
    let report = judge(&sender(), &receiver());
    report.assert_clean();
    assert_eq!(report.transfers, 2);
    assert!(report.accesses > 10 && report.steady_lines >= 6);
}

#[test]
fn a_change_of_puts_breaks_its_rule_and_no_other() {
    let table = "
        // The number is on another stream, by the host, without a fence, or before its copy.
        Race | sender | WriteValue#1 => 1 cuStreamWriteValue32 st=3 addr=0x500000 value=2 flags=0
        Race | sender | WriteValue#1 => 1 HostStore addr=0x500000 value=2
        Race | sender | WriteValue#1 => 1 cuStreamWriteValue32 st=2 addr=0x500000 value=2 flags=1
        Race | sender | WriteValue#1 => | cuMemcpy#1 << 1 cuStreamWriteValue32 st=2 addr=0x500000 value=2 flags=0
        // The slot is read before its number was seen, or when another one was, or by a thread that does not know.
        Race | receiver | HostLoad#1 =>
        Race | receiver | HostLoad#1 => 1 HostLoad addr=0x700000 value=1
        Race | receiver | HostLoad#1 => 1 HostLoad addr=0x700004 value=2
        Race | receiver | HostLoad#1 => 2 HostLoad addr=0x700000 value=2
        // The slots are used again before their credit was seen.
        Race | sender | HostLoad#0 =>
        Race | sender | HostLoad#0 => 1 HostLoad addr=0x500080 value=0
        // The credit does not wait for the reader.
        Race | receiver | cuStreamWaitEvent#0 =>
        Race | receiver | WriteValue#0 => 1 cuStreamWriteValue32 st=3 addr=0x700080 value=1 flags=0
        Race | receiver | WriteValue#0 => 1 HostStore addr=0x700080 value=1
        // Nothing was sent, or the same again.
        Unwritten | sender | cuMemcpyDtoDAsync#0 =>
        Stale | sender | cuLaunchKernel#1 =>
        // What was mapped is gone before its last use. At the sender a credit of the peer would do, too.
        Lifetime | receiver | cuStreamQuery#0 =>
        clean | sender | cuStreamQuery#0 =>
        Lifetime | sender | cuStreamQuery#0 => | HostLoad#1 =>
        // It is no steady state.
        Steady | sender | cuStreamWaitEvent#1 << 1 cuMemMap addr=0x90000 len=4096 mem=9.2 peer=0
    ";
    assert_each_breaks(judge, || [sender(), receiver()], table);
}

/// Accesses of two ranks are never those of one call, wherever they stand in their recordings.
#[test]
fn accesses_on_the_same_line_of_two_recordings() {
    let mut receiver = receiver();
    receiver.remove(at(&receiver, "cuStreamWaitEvent", 0));
    for count in 0..10 {
        let idle = vec!["1 cuStreamQuery st=9 rc=600".to_owned(); count];
        assert_only(
            &judge(&sender(), &[idle, receiver.clone()].concat()),
            Rule::Race,
        );
    }
}

/// A host that never gave its lease to a stream writes the credit itself.
#[test]
fn a_credit_by_the_host() {
    let mut receiver = receiver();
    let (first, last) = (
        at(&receiver, "cuLaunchKernel", 0),
        at(&receiver, "WriteValue", 0),
    );
    receiver.splice(
        first..=last,
        ["1 HostStore addr=0x700080 value=1".to_owned()],
    );
    judge(&sender(), &receiver).assert_clean();
}

/// A second generation, with memory and a page of its own, or with the page of the first.
#[test]
fn a_number_of_an_old_generation() {
    let generation = |page: u32, copies: &str| {
        let (sent, received) = (sender(), receiver());
        let unmapped = at(&sent, "cuStreamQuery", 0);
        let again = |lines: &[String]| -> Vec<String> {
            let other = |line: &String| {
                line.replace("0x8", "0xa8")
                    .replace("0x3", "0xa3")
                    .replace("0x50", "0xa50")
                    .replace("0x70", "0xa70")
                    .replace("mem=9.1", "mem=9.2")
                    .replace("file=1.77", &format!("file=1.{page}"))
                    .replace("st=2", "st=4")
            };
            lines.iter().map(other).collect()
        };
        let second: Vec<String> = again(&sent[1..unmapped])
            .into_iter()
            .filter(|line| !line.contains("cuMemcpy") || copies == "all")
            .collect();
        let mut sender = sent[..unmapped].to_vec();
        sender.extend(second);
        let mut receiver = received.clone();
        receiver.truncate(at(&received, "cuStreamQuery", 0));
        receiver.extend(again(&received[..receiver.len()]));
        let expect = Expect {
            warm_up: usize::MAX,
            fresh: Fresh::WithGaps,
            ..EXPECT
        };
        judge_as(&sender, &receiver, expect)
    };
    generation(78, "all").assert_clean();
    // A number that the first generation wrote, too, orders nothing.
    assert!(generation(77, "all").broke(Rule::Race));
    assert!(generation(78, "none").broke(Rule::Unwritten));
}

/// An address of host memory may come back for another page; the words of the first are gone.
#[test]
fn a_page_at_the_address_of_another() {
    let page = |file: &str| {
        format!(
            "1 cuMemHostRegister addr=0x500000 len=4096 flags=3 file={file} from=0
            1 cuStreamWriteValue32 st=2 addr=0x500000 value=1 flags=0
            1 cuStreamQuery st=2 rc=0
            1 cuMemHostUnregister addr=0x500000 len=4096"
        )
    };
    let judge = |text: &str| check(&[recording("one", &lines(text))], EXPECT);
    judge(&format!("{}\n{}", page("1.1"), page("1.2"))).assert_clean();
    // Another thread ended it; that the address came back says that it had.
    let by_another = page("1.1").replace(
        "1 cuMemHostUnreg",
        "2 cuStreamQuery st=2 rc=0\n2 cuMemHostUnreg",
    );
    let pinned =
        "1 cuMemHostAlloc addr=0x500000 len=4096 flags=0\n1 cuMemcpyDtoHAsync st=3 w=0x500000:8";
    judge(&format!(
        "1 Mark name=run\n{by_another}\n{pinned}\n1 Mark name=end"
    ))
    .assert_clean();
    let unseen = page("1.1").replace("1 cuStreamQuery st=2 rc=0", "");
    assert_only(&judge(&unseen), Rule::Lifetime);
}
