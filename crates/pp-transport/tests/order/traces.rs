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

pub(crate) fn judge(sender: &[String], receiver: &[String]) -> Report {
    judge_as(sender, receiver, EXPECT)
}

pub(crate) fn judge_as(sender: &[String], receiver: &[String], expect: Expect) -> Report {
    let ranks = [recording("sender", sender), recording("receiver", receiver)];
    check(&ranks, expect)
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

/// Changes good recordings as each row of the table says: `RULE | RANK | CHANGE | ...`, where a change is `TEXT#N => LINES`,
/// which replaces the n-th line with this text, or `TEXT#N << LINES`, which inserts before it. That breaks this rule and no
/// other; with `+` others may be broken with it, and with `!` it is not broken; `clean` breaks none.
#[track_caller]
pub(crate) fn assert_each_breaks(
    judge: impl Fn(&[String], &[String]) -> Report,
    good: impl Fn() -> [Vec<String>; 2],
    table: &str,
) {
    let rows = lines(table).into_iter();
    for row in rows.filter(|row| !row.starts_with("//")) {
        let mut parts = row.split(" | ");
        let (rule, rank) = (parts.next().unwrap(), parts.next().unwrap());
        let mut ranks = good();
        let of = &mut ranks[usize::from(rank == "receiver")];
        for change in parts {
            let inserted = change
                .split_once(" << ")
                .map(|(place, new)| (place, new, 0));
            let replaced = || change.split_once(" =>").map(|(place, new)| (place, new, 1));
            let (place, new, count) = inserted.or_else(replaced).unwrap();
            let (text, n) = place.rsplit_once('#').unwrap();
            let place = at(of, text, n.parse().unwrap());
            of.splice(place..place + count, lines(&new.replace("; ", "\n")));
        }
        let report = judge(&ranks[0], &ranks[1]);
        let mut broken = report
            .violations
            .iter()
            .map(|one| format!("{:?}", one.rule));
        let is_right = match (rule.strip_prefix('!'), rule.strip_suffix('+')) {
            (Some(rule), _) => broken.all(|one| one != rule),
            (_, Some(rule)) => broken.any(|one| one == rule),
            _ if rule == "clean" => broken.len() == 0,
            _ => broken.len() > 0 && broken.all(|one| one == rule),
        };
        assert!(is_right, "{row}: {:?}", report.violations);
    }
}

#[test]
fn a_good_run_is_accepted() {
    let report = judge(&sender(), &receiver());
    report.assert_clean();
    assert_eq!((report.transfers, report.accesses), (4, 10));
    assert!(report.steady_lines > 10);
}

#[test]
fn each_spoiled_trace_breaks_the_rule_named_for_it() {
    let table = "
        // A slot is written again before its send was seen done.
        Race | sender | cuEventQuery#0 =>
        // The query said \"not yet\", which orders nothing.
        Race | sender | cuEventQuery#0 => 1 cuEventQuery ev=2 rc=600
        // Another thread has seen it done; nothing says that this one knows.
        Race | sender | cuEventQuery#0 => 2 cuEventQuery ev=2 rc=0
        // A slot is received into while its reader reads.
        Race | receiver | cuStreamWaitEvent#0 =>
        // Nobody wrote the payload; it is sent twice; it passes through the host.
        Unwritten | sender | cuLaunchKernel#0 =>
        Stale | sender | cuLaunchKernel#1 =>
        Steady | sender | cuLaunchKernel#1 => 1 cuMemcpyHtoDAsync st=1 r=0x7000:100 w=0x1000:100
        // Memory is freed before its last reader is done, or before its last use.
        Lifetime | sender | cuEventQuery#1 =>
        Lifetime+ | sender | cuMemFree#0 => | cuLaunchKernel#1 << 1 cuMemFree addr=0x1000 len=256 dev=0
        // Sizes and types differ.
        Agreement | receiver | ncclRecv#1 => 1 ncclRecv comm=1 peer=0 dt=1 len=99 st=1 depth=0 op=2 w=0x1000:100
        Agreement | receiver | ncclRecv#1 => 1 ncclRecv comm=1 peer=0 dt=0 len=100 st=1 depth=0 op=2 w=0x1000:100
        // A payload is sent before it is written, or read before it has arrived.
        Race+ | sender | cuStreamWaitEvent#0 =>
        Race+ | sender | cuStreamWaitEvent#1 =>
        Race+ | receiver | cuEventQuery ev=1#0 =>
        // The wait was called before the event was recorded again: it waits for the payload before.
        Race+ | sender | cuStreamWaitEvent#1 => | cuEventRecord ev=1#1 << 1 cuStreamWaitEvent ev=1 st=2
        // A neighbour reaches one byte too far, or just far enough.
        Race+ | sender | cuEventRecord ev=1#0 << 1 cuLaunchKernel st=3 w=0x1063:100
        !Race | sender | cuEventRecord ev=1#0 << 1 cuLaunchKernel st=3 w=0x1064:100
        // A second thread issues.
        Issuer+ | sender | ncclSend#1 => 2 ncclSend comm=1 peer=1 dt=1 len=100 st=2 depth=0 op=2 r=0x1000:100 | NcclLaunch#1 => 2 NcclLaunch comm=1 st=2 ops=2
        // What the steady state must not do.
        Steady | sender | cuLaunchKernel#1 << 1 cuStreamSynchronize st=1 phase=begin
        Steady | sender | cuLaunchKernel#1 << 1 cuCtxSynchronize dev=0 phase=begin
        Steady | sender | cuLaunchKernel#1 << 1 cuEventSynchronize ev=1 phase=begin
        Steady | sender | cuLaunchKernel#1 << 1 cuMemAlloc addr=0x9000 len=16 dev=0
        Steady | sender | cuLaunchKernel#1 << 1 cuMemFree addr=0x9000 len=16 dev=0
        Steady | sender | cuLaunchKernel#1 << 1 cuEventCreate ev=9 dev=0 flags=2
        Steady | sender | cuLaunchKernel#1 << 1 cuStreamCreate st=9 dev=0 flags=1
        // What the fakes complain about.
        Fault | sender | cuEventRecord#0 << 0 Fault what=foreign who=copy addr=0x1 len=1
    ";
    assert_each_breaks(judge, || [sender(), receiver()], table);
}

/// Where payloads have gaps it is enough that something was written, and it must have been.
#[test]
fn payloads_with_gaps() {
    let expect = Expect {
        fresh: Fresh::WithGaps,
        ..EXPECT
    };
    let judge = |sender: &[String]| judge_as(sender, &receiver(), expect);
    let mut gaps = sender();
    for n in 0..2 {
        let kernel = at(&gaps, "cuLaunchKernel", n);
        gaps[kernel] = "1 cuLaunchKernel st=1 w=0x1010:7".into();
    }
    judge(&gaps).assert_clean();
    gaps.remove(at(&gaps, "cuLaunchKernel", 1));
    assert_only(&judge(&gaps), Rule::Stale);
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
    judge_as(&sender, &receiver, expect).assert_clean();
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
fn a_connection_used_before_its_test_byte_arrived_breaks_the_race_rule() {
    let (mut sender, receiver) = two_generations();
    sender.remove(at(&sender, "2 cuEventQuery ev=3", 0));
    assert!(judge(&sender, &receiver).broke(Rule::Race));
}

#[test]
fn transfers_in_another_order_than_the_peers_break_the_agreement_rule() {
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
fn a_send_without_its_receive_breaks_the_agreement_rule() {
    let mut sender = sender();
    sender.truncate(at(&sender, "ncclSend", 1));
    assert!(judge(&sender, &receiver()).broke(Rule::Agreement));
    let killed = Expect {
        complete: false,
        ..EXPECT
    };
    judge_as(&sender, &receiver(), killed).assert_clean();
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
