//! Small traces written by hand: two ranks, two slots of one edge, and one change for each rule.

use pp_fakes::check::{Expect, Fresh, Recording, Report, Rule, check};

pub(crate) const EXPECT: Expect = Expect {
    warm_up: 0,
    complete: true,
    fresh: Fresh::Whole,
    late_events: 0,
};

/// Lines of "THREAD NAME key=value ..." as a recording.
pub(crate) fn recording(process: &str, lines: &[String]) -> Recording {
    let text: String = lines
        .iter()
        .enumerate()
        .map(|(n, line)| {
            let (thread, rest) = line.split_once(' ').unwrap();
            format!("{} {thread} 0 {rest}\n", n + 1)
        })
        .collect();
    Recording::parse(process, &text)
}

pub(crate) fn lines(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect()
}

/// The sender: fills a slot on its stage's stream, sends it on another, and uses it again once it has seen it sent.
fn sender() -> Vec<String> {
    lines(
        "
        1 cuMemAlloc addr=0x1000 len=256 dev=0
        1 ncclCommInit comm=1 phase=begin uid=a rank=0 ranks=2 dev=0
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 ncclSend comm=1 peer=1 dt=1 len=100 st=2 depth=0 op=1 r=0x1000:100
        1 NcclLaunch comm=1 st=2 ops=1
        1 cuEventRecord ev=2 st=2
        1 cuEventQuery ev=2 rc=0
        1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=2
        1 ncclSend comm=1 peer=1 dt=1 len=100 st=2 depth=0 op=2 r=0x1000:100
        1 NcclLaunch comm=1 st=2 ops=2
        1 cuEventRecord ev=2 st=2
        1 cuEventQuery ev=2 rc=0
        1 cuMemFree addr=0x1000 len=256 dev=0
    ",
    )
}

/// The receiver: the other way round.
fn receiver() -> Vec<String> {
    lines(
        "
        1 cuMemAlloc addr=0x1000 len=256 dev=1
        1 ncclCommInit comm=1 phase=begin uid=a rank=1 ranks=2 dev=1
        1 ncclRecv comm=1 peer=0 dt=1 len=100 st=1 depth=0 op=1 w=0x1000:100
        1 NcclLaunch comm=1 st=1 ops=1
        1 cuEventRecord ev=1 st=1
        1 cuEventQuery ev=1 rc=0
        1 cuLaunchKernel st=2 r=0x1000:100
        1 cuEventRecord ev=2 st=2
        1 cuStreamWaitEvent ev=2 st=1
        1 ncclRecv comm=1 peer=0 dt=1 len=100 st=1 depth=0 op=2 w=0x1000:100
        1 NcclLaunch comm=1 st=1 ops=2
        1 cuEventRecord ev=1 st=1
        1 cuEventQuery ev=1 rc=0
        1 cuLaunchKernel st=2 r=0x1000:100
        1 cuEventRecord ev=2 st=2
        1 cuEventQuery ev=2 rc=0
        1 cuMemFree addr=0x1000 len=256 dev=1
    ",
    )
}

fn judge(sender: &[String], receiver: &[String]) -> Report {
    check(
        &[recording("sender", sender), recording("receiver", receiver)],
        EXPECT,
    )
}

/// The place of the n-th line that contains a text.
pub(crate) fn at(lines: &[String], text: &str, n: usize) -> usize {
    (0..lines.len())
        .filter(|&at| lines[at].contains(text))
        .nth(n)
        .unwrap()
}

#[track_caller]
pub(crate) fn assert_only(report: &Report, rule: Rule) {
    assert!(!report.violations.is_empty(), "{rule:?} was not seen");
    for violation in &report.violations {
        assert_eq!(violation.rule, rule, "{violation}");
    }
}

pub(crate) const SENDER: usize = 0;
pub(crate) const RECEIVER: usize = 1;

/// In the lines of a rank the n-th that contains a text becomes others, and that breaks a rule.
pub(crate) type Change<'a> = (usize, &'a str, usize, &'a str, Rule);

#[track_caller]
pub(crate) fn assert_each_breaks(
    judge: impl Fn(&[String], &[String]) -> Report,
    good: impl Fn() -> [Vec<String>; 2],
    changes: &[Change<'_>],
) {
    for &(rank, text, n, instead, rule) in changes {
        let mut ranks = good();
        let place = at(&ranks[rank], text, n);
        println!("{} becomes {instead:?}", ranks[rank][place]);
        ranks[rank].splice(place..=place, lines(instead));
        assert_only(&judge(&ranks[0], &ranks[1]), rule);
    }
}

#[test]
fn a_good_run_is_accepted() {
    let report = judge(&sender(), &receiver());
    report.assert_clean();
    assert_eq!((report.transfers, report.accesses), (4, 10));
    assert!(report.steady_lines > 10);
}

/// One line of one rank is another, or is missing.
#[test]
fn a_changed_line_breaks_its_rule_and_no_other() {
    use Rule::{Agreement, Lifetime, Race, Stale, Steady, Unwritten};
    let recv = |what| format!("1 ncclRecv comm=1 peer=0 {what} st=1 depth=0 op=2 w=0x1000:100");
    let changes = [
        // A slot is written again before its send was seen done.
        (SENDER, "cuEventQuery", 0, "", Race),
        // The query said "not yet", which orders nothing.
        (
            SENDER,
            "cuEventQuery",
            0,
            "1 cuEventQuery ev=2 rc=600",
            Race,
        ),
        // Another thread has seen it done; nothing says that this one knows.
        (SENDER, "cuEventQuery", 0, "2 cuEventQuery ev=2 rc=0", Race),
        // A slot is received into while its reader reads.
        (RECEIVER, "cuStreamWaitEvent", 0, "", Race),
        // Nobody wrote the payload.
        (SENDER, "cuLaunchKernel", 0, "", Unwritten),
        // A payload is sent twice.
        (SENDER, "cuLaunchKernel", 1, "", Stale),
        // It passes through the host.
        (
            SENDER,
            "cuLaunchKernel",
            1,
            "1 cuMemcpyHtoDAsync st=1 r=0x7000:100 w=0x1000:100",
            Steady,
        ),
        // Memory is freed before its last reader is done.
        (SENDER, "cuEventQuery", 1, "", Lifetime),
        // Sizes and types differ.
        (RECEIVER, "ncclRecv", 1, &recv("dt=1 len=99"), Agreement),
        (RECEIVER, "ncclRecv", 1, &recv("dt=0 len=100"), Agreement),
    ];
    assert_each_breaks(judge, || [sender(), receiver()], &changes);
}

/// Other rules may be broken with it.
#[test]
fn a_payload_sent_before_it_is_written_or_read_before_it_has_arrived() {
    for n in 0..2 {
        let mut sender = sender();
        sender.remove(at(&sender, "cuStreamWaitEvent", n));
        assert!(judge(&sender, &receiver()).broke(Rule::Race));
    }
    let mut receiver = receiver();
    receiver.remove(at(&receiver, "cuEventQuery ev=1", 0));
    assert!(judge(&sender(), &receiver).broke(Rule::Race));
}

/// The wait is there, but it was called before the event was recorded again: it waits for the payload before.
#[test]
fn a_wait_for_the_recording_before() {
    let mut sender = sender();
    let (record, wait) = (
        at(&sender, "cuEventRecord ev=1", 1),
        at(&sender, "cuStreamWaitEvent", 1),
    );
    sender.swap(record, wait);
    assert!(judge(&sender, &receiver()).broke(Rule::Race));
}

/// Also where the ranges only overlap.
#[test]
fn a_neighbour_that_reaches_one_byte_too_far() {
    let mut sender = sender();
    let kernel = at(&sender, "cuEventRecord ev=1", 0);
    sender.insert(kernel, "1 cuLaunchKernel st=3 w=0x1063:100".into());
    let report = judge(&sender, &receiver());
    assert!(report.broke(Rule::Race));
    let kernel = at(&sender, "0x1063", 0);
    sender[kernel] = "1 cuLaunchKernel st=3 w=0x1064:100".into();
    assert!(!judge(&sender, &receiver()).broke(Rule::Race));
}

/// Where payloads have gaps it is enough that something was written, and it must have been.
#[test]
fn payloads_with_gaps() {
    let expect = Expect {
        fresh: Fresh::WithGaps,
        ..EXPECT
    };
    let judge = |sender: &[String]| {
        let all = [
            recording("sender", sender),
            recording("receiver", &receiver()),
        ];
        check(&all, expect)
    };
    let mut gaps = sender();
    for n in 0..2 {
        let kernel = at(&gaps, "cuLaunchKernel", n);
        gaps[kernel] = "1 cuLaunchKernel st=1 w=0x1010:7".into();
    }
    judge(&gaps).assert_clean();
    gaps.remove(at(&gaps, "cuLaunchKernel", 1));
    assert_only(&judge(&gaps), Rule::Stale);
}

#[test]
fn used_after_it_was_freed() {
    let mut sender = sender();
    let free = sender.pop().unwrap();
    let kernel = at(&sender, "cuLaunchKernel", 1);
    sender.insert(kernel, free);
    let report = judge(&sender, &receiver());
    assert!(report.broke(Rule::Lifetime));
}

/// A second generation: another thread makes the communicator and tries it out, then the first goes on.
fn with_another_generation(mut lines_so_far: Vec<String>, rank: u32, other: &str) -> Vec<String> {
    let free = lines_so_far.pop().unwrap();
    let (call, direction) = if rank == 0 {
        ("ncclSend", "r")
    } else {
        ("ncclRecv", "w")
    };
    let peer = 1 - rank;
    lines_so_far.extend(lines(&format!(
        "
        2 ncclCommInit comm=2 phase=begin uid=b rank={rank} ranks=2 dev={rank}
        2 {call} comm=2 peer={peer} dt=1 len=1 st=3 depth=0 op=3 {direction}=0x1000:1
        2 NcclLaunch comm=2 st=3 ops=3
        2 cuEventRecord ev=3 st=3
        2 cuEventQuery ev=3 rc=0
        {other}
        1 {call} comm=2 peer={peer} dt=1 len=100 st=3 depth=0 op=4 {direction}=0x1000:100
        1 NcclLaunch comm=2 st=3 ops=4
        1 cuEventRecord ev=3 st=3
        1 cuEventQuery ev=3 rc=0
        {free}
    "
    )));
    lines_so_far
}

fn two_generations() -> (Vec<String>, Vec<String>) {
    let fills = "1 cuLaunchKernel st=1 w=0x1000:100
        1 cuEventRecord ev=1 st=1
        1 cuStreamWaitEvent ev=1 st=3";
    (
        with_another_generation(sender(), 0, fills),
        with_another_generation(receiver(), 1, ""),
    )
}

#[test]
fn a_thread_that_connects_while_the_issuer_stands_aside() {
    let (sender, receiver) = two_generations();
    // To connect is no work of the steady state.
    let expect = Expect {
        warm_up: usize::MAX,
        ..EXPECT
    };
    let recordings = [
        recording("sender", &sender),
        recording("receiver", &receiver),
    ];
    check(&recordings, expect).assert_clean();
}

#[test]
fn an_issuer_that_calls_beside_the_thread_that_connects() {
    let (mut sender, receiver) = two_generations();
    let last = sender.remove(at(&sender, "2 cuEventQuery ev=3", 0));
    let launch = at(&sender, "NcclLaunch comm=2 st=3 ops=4", 0);
    sender.insert(launch, last);
    assert!(judge(&sender, &receiver).broke(Rule::Issuer));
}

/// The thread that connected did not see the byte sent: the next write there may be too early.
#[test]
fn a_connection_that_is_handed_over_before_it_was_tried_out() {
    let (mut sender, receiver) = two_generations();
    sender.remove(at(&sender, "2 cuEventQuery ev=3", 0));
    assert!(judge(&sender, &receiver).broke(Rule::Race));
}

#[test]
fn a_second_issuer() {
    let mut sender = sender();
    let send = at(&sender, "ncclSend", 1);
    sender[send] = sender[send].replacen("1 ", "2 ", 1);
    let launch = at(&sender, "NcclLaunch", 1);
    sender[launch] = sender[launch].replacen("1 ", "2 ", 1);
    assert!(judge(&sender, &receiver()).broke(Rule::Issuer));
}

#[test]
fn operations_in_another_order() {
    let mut sender = sender();
    let (one, two) = (at(&sender, "ncclSend", 0), at(&sender, "ncclSend", 1));
    sender[two] = sender[two].replace("len=100", "len=50");
    let mut receiver = receiver();
    let recv = at(&receiver, "ncclRecv", 1);
    receiver[recv] = receiver[recv].replace("len=100", "len=50");
    judge(&sender, &receiver).assert_clean();
    let (first, second) = (at(&sender, "ops=1", 0), at(&sender, "ops=2", 0));
    sender.swap(first, second);
    sender.swap(one, two);
    assert!(judge(&sender, &receiver).broke(Rule::Agreement));
}

#[test]
fn a_transfer_without_its_other_side() {
    let mut sender = sender();
    sender.truncate(at(&sender, "ncclSend", 1));
    assert!(judge(&sender, &receiver()).broke(Rule::Agreement));
    let all = [
        recording("sender", &sender),
        recording("receiver", &receiver()),
    ];
    let killed = check(
        &all,
        Expect {
            complete: false,
            ..EXPECT
        },
    );
    killed.assert_clean();
}

/// Memory that comes and goes in the order of a stream is there for that stream, and for a stream that waits for it.
#[test]
fn memory_in_the_order_of_a_stream() {
    let judge = |other: &str| {
        let text = format!(
            "
            1 cuMemAllocAsync addr=0x5000 len=64 dev=0 st=1
            1 cuLaunchKernel st=1 w=0x5000:64
            {other}
            1 cuMemFreeAsync addr=0x5000 len=64 dev=0 st=1
            "
        );
        check(&[recording("one", &lines(&text))], EXPECT)
    };
    judge("1 cuLaunchKernel st=1 r=0x5000:64").assert_clean();
    assert!(judge("1 cuLaunchKernel st=2 r=0x5000:64").broke(Rule::Race));
    assert!(judge("1 cuLaunchKernel st=2 r=0x5000:64").broke(Rule::Lifetime));
    let nothing_in_it =
        "1 cuMemAllocAsync addr=0x6000 len=8 dev=0 st=1\n1 cuLaunchKernel st=1 r=0x6000:8";
    assert_only(&judge(nothing_in_it), Rule::Unwritten);
}

/// Each rank sends first and receives then, on one stream: it works up to the eager limit and hangs above it.
#[test]
fn an_order_that_only_eager_sends_survive() {
    let rank = |rank: u32, first: &str, second: &str| {
        let peer = 1 - rank;
        let op = |name: &str, op: u32| {
            let access = if name == "ncclSend" {
                "r=0x1000:100"
            } else {
                "w=0x2000:100"
            };
            lines(&format!(
                "
                1 {name} comm=1 peer={peer} dt=1 len=100 st=1 depth=0 op={op} {access}
                1 NcclLaunch comm=1 st=1 ops={op}
            "
            ))
        };
        let begin =
            format!("1 ncclCommInit comm=1 phase=begin uid=a rank={rank} ranks=2 dev={rank}");
        [vec![begin], op(first, 1), op(second, 2)].concat()
    };
    let same = judge(
        &rank(0, "ncclSend", "ncclRecv"),
        &rank(1, "ncclSend", "ncclRecv"),
    );
    assert_only(&same, Rule::Deadlock);
    judge(
        &rank(0, "ncclSend", "ncclRecv"),
        &rank(1, "ncclRecv", "ncclSend"),
    )
    .assert_clean();
}

/// Three ranks reduce and hand on: what one call reads and writes is in its own hands, and every rank does the same.
#[test]
fn collectives_of_a_group() {
    let member = |rank: u32, reduced: &str, handed: &str| {
        let text = format!(
            "
            1 cuMemAlloc addr=0x1000 len=256 dev={rank}
            1 ncclCommInit comm=1 phase=begin uid=a rank={rank} ranks=3 dev={rank}
            1 cuLaunchKernel st=1 w=0x1000:64
            1 ncclAllReduce comm=1 dt=7 len={reduced} operation=0 root=-1 st=1 op=1 r=0x1000:64 w=0x1000:64
            1 NcclLaunch comm=1 st=1 ops=1
            1 ncclBroadcast comm=1 dt=7 len=64 operation=0 root={handed} st=1 op=2 r=0x1000:64 w=0x1000:64
            1 NcclLaunch comm=1 st=1 ops=2
            "
        );
        recording(&format!("member {rank}"), &lines(&text))
    };
    let judge = |last| check(&[member(0, "64", "1"), member(1, "64", "1"), last], EXPECT);
    judge(member(2, "64", "1")).assert_clean();
    assert_only(&judge(member(2, "32", "1")), Rule::Agreement);
    assert_only(&judge(member(2, "64", "0")), Rule::Agreement);
    let swapped = member(2, "64", "1").lines;
    let mut swapped = Recording {
        process: "swapped".into(),
        lines: swapped,
    };
    swapped.lines.swap(4, 6);
    assert!(judge(swapped).broke(Rule::Agreement));
}

#[test]
fn what_the_steady_state_must_not_do() {
    for call in [
        "cuStreamSynchronize st=1 phase=begin",
        "cuCtxSynchronize dev=0 phase=begin",
        "cuEventSynchronize ev=1 phase=begin",
        "cuMemAlloc addr=0x9000 len=16 dev=0",
        "cuMemFree addr=0x9000 len=16 dev=0",
        "cuEventCreate ev=9 dev=0 flags=2",
        "cuStreamCreate st=9 dev=0 flags=1",
    ] {
        let mut sender = sender();
        let kernel = at(&sender, "cuLaunchKernel", 1);
        sender.insert(kernel, format!("1 {call}"));
        assert_only(&judge(&sender, &receiver()), Rule::Steady);
    }
}

#[test]
fn what_the_fakes_complain_about() {
    let mut sender = sender();
    sender.insert(3, "0 Fault what=foreign who=copy addr=0x1 len=1".into());
    assert_only(&judge(&sender, &receiver()), Rule::Fault);
}
