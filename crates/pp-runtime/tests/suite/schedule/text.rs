//! The text form.

use pp_runtime::schedule::Schedule;
use pp_testing::rows;

use super::golden::{self, CUSTOM, ZB1P_LOWERED};

fn parse(text: &str) -> Schedule {
    Schedule::parse_csv(text).unwrap()
}

#[test]
fn what_is_written_is_read_back_equal() {
    for (case, schedule) in golden::matrix() {
        let lowered = schedule.lower(true).unwrap();
        for schedule in [schedule, lowered] {
            assert_eq!(parse(&schedule.to_csv()), schedule, "{case}");
        }
    }
}

#[test]
fn a_file_of_pytorch_is_written_as_it_was() {
    let sharded = "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD,0RESHARD\n\
                   1RECV_F0,1F0,1I0,1SEND_B0,1W0,1WAIT_SEND_B0\n";
    let overlapped = "0F0,(0F1;3B0)OVERLAP_F_B,0I0\n\n1F0,2F0\n";
    for file in [CUSTOM, ZB1P_LOWERED, sharded, overlapped] {
        assert_eq!(parse(file).to_csv(), file);
    }
}

#[test]
fn bubbles_whitespace_and_empty_rows_at_the_end_are_dropped() {
    let read = parse(" 0F0,,0B0 ,\t,\r\n,( 2F0 ; 1B00 )OVERLAP_F_B\r\n,\r\n\r\n");
    assert_eq!(read.to_csv(), "0F0,0B0\n(2F0;1B0)OVERLAP_F_B\n");
    assert_eq!(read.stage_to_rank(), [0, 1, 1]);
}

#[test]
fn a_stage_runs_on_the_rank_of_its_row_also_behind_an_empty_one() {
    let read = parse("1F0,1B0\n\n0F0,0B0\n");
    assert_eq!(read.stage_to_rank(), [2, 0]);
    assert_eq!(read.ranks().len(), 3);
}

#[test]
fn a_file_that_is_refused_names_the_cell() {
    let long = format!("0F0\n{}", "x".repeat(1000));
    let cut = format!("row 2, column 1: `{}…` is no action", "x".repeat(40));
    let cases = rows("
         | no action of a microbatch in the file; write one row for each rank, such as 0F0,0B0
        \u{feff}0F0,0B0 | the file begins with a byte order mark (U+FEFF); save it as UTF-8 without one
        ,,/ | no action of a microbatch in the file
        0UNSHARD | no action of a microbatch in the file
        0F0,,0X0 | row 1, column 3: `0X0` is no action; write stage, action and microbatch, such as 2F0, where the action is F, I, W, B, SEND_F, RECV_F, SEND_B, RECV_B, WAIT_SEND_F or WAIT_SEND_B; or 2UNSHARD, 2RESHARD, 2REDUCE_GRAD, 2WAIT_REDUCE_GRAD, or (7F4;0B0)OVERLAP_F_B
        0F0/ F0 | row 2, column 1: `F0` is no action
        0f0 | `0f0` is no action
        00 | `00` is no action
        0F0x | `0F0x` is no action
        0F+1 | `0F+1` is no action
        0F-1 | `0F-1` is no action
        0F0;0B0 | `0F0;0B0` is no action
        0F\u{0663} | is no action
        0\u{7}0 | `0\\u{7}0` is no action
        (0F0;1B0) | `(0F0;1B0)` is no action
        (0F0;1B0)OVERLAP | is no action
        (0F0;1B0)OVERLAP_F_B2 | is no action
        (0F0;1B0 | `(0F0;1B0` is no action
        LONG | CUT
        0F4294967296 | row 1, column 1: `0F4294967296` has a number above 4294967295
        99999999999F0 | `99999999999F0` has a number above 4294967295
        0F | row 1, column 1: `0F` names no microbatch; write its number at the end
        0UNSHARD0 | `0UNSHARD0` names a microbatch, but acts on the whole stage; remove the number at the end
        (0B0;1F0)OVERLAP_F_B | row 1, column 1: `(0B0;1F0)OVERLAP_F_B` overlaps something else than a forward and a backward of two stages; write the F first, then the B, such as (7F4;0B0)OVERLAP_F_B
        (0F1;0B0)OVERLAP_F_B | overlaps something else
        (0F1;1I0)OVERLAP_F_B | overlaps something else
        (0F1)OVERLAP_F_B | overlaps something else
        (0F1;1B0;2B0)OVERLAP_F_B | is no action
        0F0,3F0/1F0 | stage 2 is missing, but row 1, column 2: `3F0` names a stage behind it; number stages from 0 without a gap
        0F0,4294967295F0 | stage 1 is missing, but row 1, column 2: `4294967295F0`
        1F0 | stage 0 is missing
        0F0,,0F7,0B7,0B0 | microbatch 1 is missing, but row 1, column 3: `0F7` names a later one; number microbatches from 0 without a gap
        0F4294967295 | microbatch 0 is missing
        0F0,1F0//,0B0,1B0 | stage 0 acts on two ranks, row 1, column 1: `0F0` and row 3, column 2: `0B0`; write its actions in one row
        0F0,(0F1;1B0)OVERLAP_F_B/1F0 | stage 1 acts on two ranks, row 1, column 2: `(0F1;1B0)OVERLAP_F_B` and row 2, column 1: `1F0`
    ");
    for [file, text] in cases {
        let file = &file.replace('/', "\n").replace("LONG", &long);
        let text = text.replace("CUT", &cut);
        let error = Schedule::parse_csv(file).unwrap_err().to_string();
        assert!(error.contains(&text), "{file:?}: {error}");
    }
}
