//! Merging and lowering.

use std::collections::HashMap;

use pp_runtime::schedule::{Action, Op, Schedule, Step, Way};

use super::golden::{self, ZB1P, ZB1P_LOWERED};

fn parse(text: &str) -> Schedule {
    Schedule::parse_csv(text).unwrap()
}

#[test]
fn both_backwards_become_one_where_they_are_next_to_each_other() {
    let split = parse("0F0,0F1,0F2,0I0,0I1,0W0,0I2,0W2,0W1");
    assert_eq!(split.merge().to_csv(), "0F0,0F1,0F2,0I0,0I1,0W0,0B2,0W1\n");
    let others = "0F0,1F0,0I0,1W0,0I0,0W0\n";
    assert_eq!(parse(others).merge().to_csv(), "0F0,1F0,0I0,1W0,0B0\n");
}

#[test]
fn every_lowered_list_is_pytorchs_action_by_action() {
    for golden in golden::all() {
        let lowered = golden.compute().lower(true).unwrap();
        assert!(lowered.to_csv() == golden.lowered(), "{golden:?}");
    }
}

#[test]
fn merged_and_without_waits_a_list_is_pytorchs() {
    let lowered = parse(ZB1P).merge().lower(false).unwrap();
    assert_eq!(lowered.to_csv(), ZB1P_LOWERED);
}

#[test]
fn an_overlapped_pair_among_four_stages_moves_receives_as_in_pytorch() {
    let lowered = parse(
        "0F1,0F0,1F0,1F1,2F0,2F1,4F1,4B1,2B1,1B1,(4F0;0B1)OVERLAP_F_B,4B0,2B0,1B0,0B0\n3F1,3B1,3F0,3B0",
    );
    // Made by PyTorch 2.15, with what it adds for stages that are sharded, then without.
    let pytorch = "0F1,0F0,1F0,1F1,2F0,2SEND_F0,2F1,2SEND_F1,4RECV_F1,4F1,4B1,4SEND_B1,2RECV_B1,4RECV_F0,2B1,\
                   2WAIT_SEND_F1,1B1,(4F0;0B1)OVERLAP_F_B,4B0,4SEND_B0,2RECV_B0,2B0,2WAIT_SEND_F0,1B0,0B0,\
                   4WAIT_SEND_B1,4WAIT_SEND_B0\n\
                   3RECV_F0,3RECV_F1,3F1,3SEND_F1,3RECV_B1,3B1,3WAIT_SEND_F1,3SEND_B1,3F0,3SEND_F0,3RECV_B0,3B0,\
                   3WAIT_SEND_F0,3SEND_B0,3WAIT_SEND_B1,3WAIT_SEND_B0\n";
    assert_eq!(lowered.lower(true).unwrap().to_csv(), pytorch);
}

/// The actions of one edge on one rank, in their order.
type OnEdge = HashMap<(u32, Way), Vec<u32>>;

/// What was sent, received and waited for by the sending stage and way; and the computations that are left.
fn parts(lowered: &Schedule) -> ([OnEdge; 3], Vec<Vec<Step>>) {
    let mut edges: [OnEdge; 3] = Default::default();
    let mut computations = Vec::new();
    for steps in lowered.ranks() {
        let (one, rest): (Vec<Step>, _) = steps
            .iter()
            .partition(|step| step.actions().any(|action| action.op.is_compute()));
        computations.push(one);
        for Action {
            stage,
            op,
            microbatch,
        } in rest.iter().flat_map(Step::actions)
        {
            let (part, from, way) = match op {
                Op::Send(way) => (0, stage, way),
                Op::Receive(Way::Forward) => (1, stage - 1, Way::Forward),
                Op::Receive(Way::Backward) => (1, stage + 1, Way::Backward),
                Op::WaitSend(way) => (2, stage, way),
                op => panic!("{op:?}"),
            };
            edges[part].entry((from, way)).or_default().push(microbatch);
        }
    }
    (edges, computations)
}

#[test]
fn each_edge_is_received_in_the_order_of_its_sends_and_each_send_is_waited_for() {
    for (case, schedule) in golden::matrix() {
        let ([sends, receives, mut waits], computations) = parts(&schedule.lower(true).unwrap());
        assert_eq!(computations, schedule.ranks(), "{case}");
        assert_eq!(sends, receives, "{case}");
        let mut sorted = sends;
        let lists = sorted.values_mut().chain(waits.values_mut());
        lists.for_each(|list| list.sort_unstable());
        assert_eq!(sorted, waits, "{case}");
        let crossed = schedule
            .stage_to_rank()
            .windows(2)
            .filter(|pair| pair[0] != pair[1]);
        assert_eq!(sorted.len(), 2 * crossed.count(), "{case}");
    }
}

#[test]
fn what_cannot_be_lowered_is_refused_in_one_line() {
    let cases = [
        (
            "0F0,0SEND_F0\n1F0",
            "rank 0 has 0SEND_F0; lower a schedule of F, I, W and B alone",
        ),
        ("0F0\n1UNSHARD,1F0", "rank 1 has 1UNSHARD; lower"),
        ("0F0,0B0,0REDUCE_GRAD", "rank 0 has 0REDUCE_GRAD; lower"),
        (
            "0F0,0F1\n1F1",
            "stage 1 has 1 forwards of 2 microbatches; give it one of each",
        ),
        (
            "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1",
            "deadlock: rank 0 waits at 0B0, rank 1 waits at 1F1; run what each waits for before it",
        ),
        (
            "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1\n2F0,2F1,2B0",
            "rank 0 waits at (0F1;1B0)OVERLAP_F_B, rank 1 waits at 2F1; run",
        ),
    ];
    for (file, text) in cases {
        let error = parse(file).lower(false).unwrap_err().to_string();
        assert!(error.contains(text), "{file}: {error}");
    }
}

#[test]
fn of_many_ranks_that_wait_an_error_shows_some() {
    let last = "17F1,17F0,17B0,17B1".to_owned();
    let others = (0..17).map(|stage| format!("{stage}F0,{stage}B0,{stage}F1,{stage}B1"));
    let rows: Vec<String> = others.chain([last]).collect();
    let error = parse(&rows.join("\n"))
        .lower(false)
        .unwrap_err()
        .to_string();
    let end = "rank 15 waits at 15B0, and 2 more ranks; run what each waits for before it";
    assert!(error.ends_with(end), "{error}");
}
