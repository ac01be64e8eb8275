//! `pp schedule`: what it prints, what it refuses and how it ends.

use pp_runtime::schedule::Kind;
use pp_testing::process::{Ended, run};
use pp_testing::{assert_has, rows, words};
use serde_json::{Value, json};

use crate::common::{folder, pp};

fn schedule(args: &[&str]) -> Ended {
    run(&mut pp(&[&["schedule"], args].concat()), None)
}

fn text(args: &[&str]) -> String {
    String::from_utf8(schedule(args).succeeded().stdout).unwrap()
}

fn json_of(args: &[&str]) -> Value {
    serde_json::from_str(&text(&[args, &["--json"]].concat())).unwrap()
}

const SIZE: [&str; 4] = ["--ranks", "4", "--microbatches", "8"];

#[test]
fn a_file_that_is_no_right_schedule_ends_with_3_and_names_its_actions() {
    let folder = folder("bad_schedules");
    let head_on = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
    // The command, what the file has, more arguments, words of the line.
    let cases = rows(
        "
        check | 0F0,0W0,0I0/ |  | 0W0 (rank 0, action 2); 0I0
        simulate | 0F0,0W0,0I0/ | --json | 0W0 (rank 0, action 2); 0I0
        plot | 0F0,0W0,0I0/ |  | 0W0 (rank 0, action 2); 0I0
        check | HEAD_ON | --slots 0 | 0SEND_F1 (rank 0, action 4); 1SEND_B0
        show | HEAD_ON | --lowered | rank 0; 0SEND_F0
        show | 0F0,0B0,nonsense/ |  | row 1, column 3; nonsense
    ",
    );
    for [command, file, more, told] in cases {
        let file = file.replace("HEAD_ON", head_on).replace('/', "\n");
        let path = folder.write("bad.csv", file.as_bytes());
        let args = [&[command, path.to_str().unwrap()], &words(more)[..]].concat();
        let told: Vec<&str> = ["bad.csv"].into_iter().chain(told.split("; ")).collect();
        let ended = schedule(&args).failed(3, &told);
        assert!(ended.stdout.is_empty());
    }
}

#[test]
fn what_cannot_be_asked_for_ends_with_2_and_what_cannot_be_read_with_4() {
    let folder = folder("schedule_usage");
    let file = folder.write("good.csv", b"0F0,0B0\n");
    let file = file.to_str().unwrap();
    let picture = folder.write("good.svg", b"0F0,0B0\n");
    let picture = picture.to_str().unwrap();
    let missing = folder.file("missing.csv");
    let missing = missing.to_str().unwrap();
    let cases = rows(
        "
        show 1f1b | 1f1b; --ranks; --microbatches
        simulate dualpipe --ranks 4 | dualpipe: no schedule of that name; did you mean dualpipe-v?
        show hanayo | hanayo: ; gpipe; dualpipe-v
        check FILE --ranks 2 | --ranks; leave out
        show interleaved --ranks 4 --stages-per-rank 2 --microbatches 9 | 8; 10
        show zb-h1 --ranks 4 --stages-per-rank 2 --microbatches 8 | zb-h1
        show dualpipe-v --ranks 4 --microbatches 7 | 8
        simulate FILE --weight -1 | --weight -1
        check FILE --activation-bytes 1.5 | --activation-bytes 1.5
        plot FILE --input 0.1234567 | --input 0.1234567
        plot FILE --forward 1,2 | 2 numbers; 1 stages
        simulate 1f1b --ranks 2 --microbatches 4 --weight 1,2:3 | --weight, at place 2; 2 numbers; 4 microbatches
        compare 1f1b --ranks 2 --microbatches 4 --transfer 2:3 | 2 numbers; 4 microbatches
        check FILE --activation-bytes 1:2 | --activation-bytes 1:2
        plot PICTURE --output PICTURE | FILE.csv; --output
        plot FILE --output mine.png | --output mine.png; .svg
        check MISSING | missing.csv
    ",
    );
    for [line, told] in cases {
        let code = if line.contains("MISSING") { 4 } else { 2 };
        let line = line.replace("FILE", file).replace("PICTURE", picture);
        let line = line.replace("MISSING", missing);
        let told: Vec<&str> = told.split("; ").collect();
        schedule(&words(&line)).failed(code, &told);
    }
}

#[test]
fn each_name_of_the_list_builds_a_schedule_that_is_right() {
    let list = text(&["list"]);
    let names: Vec<&str> = list
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    let expected = "naive gpipe 1f1b interleaved interleaved-zb zb-h1 looped-bfs zbv dualpipe-v";
    assert_eq!(names.join(" "), expected);
    for row in list.lines().filter(|row| !row.contains(" - ")) {
        // PyTorch has one name for both kinds of InterleavedZeroBubble.
        let names: Vec<_> = row
            .split_whitespace()
            .take(2)
            .map(str::parse::<Kind>)
            .collect();
        assert!(names[0] == names[1] || row.starts_with("zb-h1"), "{row}");
    }
    for name in names {
        let needs = json_of(&[&["check", name][..], &SIZE].concat());
        // Without --stages-per-rank as many as it needs.
        let in_a_v = ["zbv", "dualpipe-v"].contains(&name);
        assert_eq!(needs["stages"], if in_a_v { 8 } else { 4 }, "{name}");
    }
}

#[test]
fn numbers_of_a_simulation_have_the_keys_and_the_values_that_are_documented() {
    let simulated = json_of(&[&["simulate", "1f1b"][..], &SIZE].concat());
    let expected = json!({
        "makespan": 33, "idle": [9, 9, 9, 9], "slots": null, "activation_slots": [4, 3, 2, 1], "slots_per_edge": 1,
        "undone_weights": [0, 0, 0, 0]
    });
    assert_eq!(simulated, expected);
    // Each microbatch takes 0.25 + 0.5 + 2.5 + 1.
    let by_stage =
        "simulate naive --ranks 2 --microbatches 2 --forward 0.25,0.5 --input 1 --weight 0,1.5";
    let by_stage = json_of(&by_stage.split(' ').collect::<Vec<_>>());
    assert_eq!(
        (&by_stage["makespan"], &by_stage["idle"]),
        (&json!(8.5), &json!([6, 2.5]))
    );
    // 0.5 more of the second microbatch.
    let uneven = "simulate naive --ranks 2 --microbatches 2 --forward 0.25:0.75,0.5 --input 1 --weight 0,1.5:1.5";
    let uneven = json_of(&uneven.split(' ').collect::<Vec<_>>());
    assert_eq!(
        (&uneven["makespan"], &uneven["idle"]),
        (&json!(9), &json!([6, 3]))
    );
    // Where actions take no time, many begin at one moment.
    let free = ["--forward", "0", "--input", "0", "--weight", "0"];
    let free = json_of(&[&["simulate", "1f1b"][..], &SIZE, &free].concat());
    assert_eq!(
        (&free["makespan"], &free["slots_per_edge"]),
        (&json!(0), &json!(1))
    );
    // ZB-H1: idle (ranks - 1) times (F + B - 2 W).
    let costs = ["--forward", "4", "--input", "5", "--weight", "3"];
    let zb = json_of(&[&["simulate", "zb-h1"][..], &SIZE, &costs].concat());
    assert_eq!(zb["idle"][0], 3 * (4 + 8 - 6));
}

#[test]
fn from_the_bytes_of_each_stage_follow_the_most_of_each_rank() {
    let size = "1f1b --ranks 2 --microbatches 4 --activation-bytes 10,1";
    for command in ["check", "simulate", "show"] {
        let args: Vec<&str> = [command].into_iter().chain(size.split(' ')).collect();
        assert_eq!(
            json_of(&args)["activation_bytes"],
            json!([20, 1]),
            "{command}"
        );
        let printed = text(&args);
        assert!(
            printed.ends_with("\nactivation bytes by rank, at most: 20, 1\n"),
            "{printed}"
        );
    }
}

#[test]
fn a_printed_schedule_is_a_file_that_can_be_checked() {
    let lowered = text(&words(
        "show gpipe --ranks 2 --microbatches 2 --lowered --csv",
    ));
    // As PyTorch 2.15 lowers it.
    assert_eq!(
        lowered,
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0RECV_B1,0B1,0WAIT_SEND_F1\n\
         1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n"
    );
    let check = |text: &str| {
        let mut check = pp(&["schedule", "check", "-", "--slots", "2", "--json"]);
        let ended = run(&mut check, Some(text.into())).succeeded();
        serde_json::from_slice::<Value>(&ended.stdout).unwrap()
    };
    assert_eq!(check(&lowered)["lowered"], true);
    let bare = words("show gpipe --ranks 2 --microbatches 2 --csv");
    assert_eq!(check(&text(&bare))["lowered"], false);
    let shown = json_of(&bare[..6]);
    assert_eq!(
        shown["actions"],
        json!([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1F1", "1B0", "1B1"]])
    );
    assert_eq!(shown["stage_to_rank"], json!([0, 1]));
    // The table: a backward takes two columns, and a dot is a rank that waits.
    assert_eq!(
        text(&bare[..6]),
        "gpipe: ranks 2, stages 2, microbatches 2\n\
         rank 0   0F0 0F1  ·   ·   ·  0B0──── 0B1────\n\
         rank 1    ·  1F0 1F1 1B0──── 1B1────\n"
    );
    // What takes no time has no column: it is a list.
    let mut sharded = pp(&["schedule", "show", "-"]);
    let ended = run(&mut sharded, Some("0UNSHARD,0F0,0B0\n".into())).succeeded();
    let shown = String::from_utf8(ended.stdout).unwrap();
    assert!(shown.ends_with("\nrank 0   0UNSHARD 0F0 0B0\n"), "{shown}");
}

#[test]
fn messages_that_cross_between_two_ranks_are_accepted_with_a_note() {
    let size = words("--ranks 2 --stages-per-rank 2 --microbatches 4");
    let show = [&["show", "interleaved"], &size[..], &["--lowered", "--csv"]].concat();
    // Rank 1 receives for two stages, for each in the order of its edge.
    let rows = text(&show)
        .replace("3RECV_F1", "other")
        .replace("1RECV_F2", "3RECV_F1")
        .replace("other", "1RECV_F2");
    let check = |more: &[&str]| {
        let args = [&["schedule", "check", "-"], more].concat();
        run(&mut pp(&args), Some(rows.clone().into()))
            .succeeded()
            .stdout
    };
    let printed = String::from_utf8(check(&[])).unwrap();
    let last = printed.lines().last().unwrap();
    assert!(last.starts_with("note: PyTorch "), "{printed}");
    let needs: Value = serde_json::from_slice(&check(&["--json"])).unwrap();
    let crossing = json!({
        "from_rank": 0, "to_rank": 1, "sends": ["2SEND_F1", "0SEND_F2"], "receives": ["1RECV_F2", "3RECV_F1"]
    });
    assert_eq!(needs["crossings"], json!([crossing]));
}

#[test]
fn of_many_pairs_of_ranks_whose_messages_cross_a_few_are_noted() {
    let size = "show looped-bfs --ranks 6 --stages-per-rank 2 --microbatches 1 --lowered --csv";
    let args = words(size);
    // Each rank posts its receives at once, in falling order.
    let crossed = |row: &str| {
        let (mut receives, others): (Vec<&str>, Vec<&str>) =
            row.split(',').partition(|cell| cell.contains("RECV"));
        receives.reverse();
        [receives, others].concat().join(",")
    };
    let rows = text(&args)
        .lines()
        .map(crossed)
        .collect::<Vec<_>>()
        .join("\n");
    let mut check = pp(&["schedule", "check", "-"]);
    let printed = run(&mut check, Some(rows.into())).succeeded().stdout;
    let printed = String::from_utf8(printed).unwrap();
    let notes: Vec<&str> = printed
        .lines()
        .filter(|line| line.starts_with("note: "))
        .collect();
    assert_eq!(
        (notes.len(), notes[8]),
        (9, "note: and 2 more pairs of ranks; --json has all")
    );
}

#[test]
fn the_picture_has_a_bar_for_each_computation() {
    let folder = folder("schedule_plot");
    let picture = folder.file("plot.svg");
    let plot = words("plot zbv --ranks 2 --microbatches 4 --output");
    assert_eq!(
        text(&[&plot[..], &[picture.to_str().unwrap()]].concat()),
        ""
    );
    let svg = std::fs::read_to_string(picture).unwrap();
    let count = |what: &str| svg.matches(what).count();
    // Four stages; the legend has one of each class.
    for class in ["source", "stage3", "sink"] {
        assert_eq!(
            count(&format!("<rect class=\"{class}\"")),
            4 * 4 + 1,
            "{class}"
        );
    }
    assert!(svg.ends_with("</svg>\n"));
}

#[test]
fn schedules_are_compared_with_the_same_work_for_each_rank() {
    let json_of = |line: &str| json_of(&line.split(' ').collect::<Vec<_>>());
    let compared = json_of(
        "compare interleaved zbv --ranks 2 --microbatches 4 --forward 4:2:6:4,8 --input 6 --weight 2 --transfer 1,0:3:3:9 --slots 2",
    );
    let halves = "--ranks 2 --stages-per-rank 2 --microbatches 4 --input 3 --weight 1 --slots 2";
    for (at, name, costs) in [
        (
            0,
            "interleaved",
            "--forward 2:1:3:2,4,2:1:3:2,4 --transfer 1,0:3:3:9,1,0:3:3:9",
        ),
        (
            1,
            "zbv",
            "--forward 2:1:3:2,4,4,2:1:3:2 --transfer 1,0:3:3:9,0:3:3:9,1",
        ),
    ] {
        let alone = json_of(&format!("simulate {name} {halves} {costs}"));
        let beside = &compared["schedules"][at];
        let most = alone["idle"]
            .as_array()
            .unwrap()
            .iter()
            .map(|idle| idle.as_f64().unwrap());
        assert_eq!(beside["makespan"], alone["makespan"], "{name}");
        assert_eq!(beside["idle"].as_f64(), most.reduce(f64::max), "{name}");
        let slots = alone["activation_slots"].as_array().unwrap().iter();
        let most = slots
            .map(|slots| slots.as_f64().unwrap() / 2.0)
            .reduce(f64::max);
        assert_eq!(beside["activations"].as_f64(), most, "{name}");
    }
    // Of all, those that cannot have the size are left out; one that is named must.
    let all = json_of("compare --ranks 4 --microbatches 6");
    assert_eq!(all["schedules"].as_array().unwrap().len(), 8);
    let why = all["left_out"][0].as_str().unwrap();
    assert_has(why, &["dualpipe-v on 4 ranks needs at least 8"]);
    let named = words("compare 1f1b dualpipe-v --ranks 4 --microbatches 6");
    schedule(&named).failed(2, &["dualpipe-v"]);
    schedule(&["compare"]).failed(2, &["--ranks"]);
    let folder = folder("schedule_compare");
    let picture = folder.file("all.svg");
    let size = ["--ranks", "4", "--microbatches", "8", "--output"];
    text(&[&["compare"], &size[..], &[picture.to_str().unwrap()]].concat());
    let svg = std::fs::read_to_string(picture).unwrap();
    assert_eq!(svg.matches(" with any number of slots · ").count(), 9);
}

/// A report of a training, with F, I, W and B of each stage.
fn report(ranks: u32, schedule: &str, stages: &[[Value; 4]]) -> Vec<u8> {
    let stage = |(stage, [f, i, w, b]): (usize, &[Value; 4])| json!({"stage": stage, "rank": 0, "forward_ms": f, "input_ms": i, "weight_ms": w, "backward_ms": b});
    let stages: Vec<_> = stages.iter().enumerate().map(stage).collect();
    let training = json!({
        "schedule": schedule, "ranks": ranks, "microbatches": 4, "steps": 9, "loss": 0.5, "stages": stages, "step_ms": null,
        "step_simulated_ms": null, "bubble": null, "bubble_simulated": null, "cause": null
    });
    json!({"measures": {"training": training}})
        .to_string()
        .into_bytes()
}

/// Of a training on two ranks by `zbv`.
fn in_parts() -> Vec<u8> {
    let stages = [[3, 0, 7], [4, 2, 3], [5, 3, 2], [6, 1, 2]];
    let stages = stages.map(|[f, i, w]| [json!(f), json!(i), json!(w), Value::Null]);
    report(2, "zbv", &stages)
}

#[test]
fn schedules_are_compared_for_the_stages_of_a_training() {
    let folder = folder("schedule_from");
    let whole = [[3, 8], [4, 6]].map(|[f, b]| [json!(f), Value::Null, Value::Null, json!(b)]);
    let reports = [
        folder.write("parts.json", &in_parts()),
        folder.write("whole.json", &report(2, "1f1b", &whole)),
    ];
    let [parts, whole] = reports.each_ref().map(|path| path.to_str().unwrap());
    // The schedule, what its stages then take, and what of that was not measured.
    for (from, name, costs, estimated) in [
        (
            parts,
            "zbv",
            "--forward 3,4,5,6 --input 0,2,3,1 --weight 7,3,2,2",
            json!([]),
        ),
        (
            parts,
            "interleaved",
            "--stages-per-rank 2 --forward 3,4,5,6 --input 0,2,3,1 --weight 7,3,2,2",
            json!(["B"]),
        ),
        (
            parts,
            "zb-h1",
            "--forward 7,11 --input 0,4 --weight 12,4",
            json!(["split"]),
        ),
        (
            whole,
            "gpipe",
            "--forward 3,4 --input 0,0 --weight 8,6",
            json!([]),
        ),
        (
            whole,
            "zb-h1",
            "--forward 3,4 --input 0,3 --weight 8,3",
            json!(["I and W"]),
        ),
        (
            whole,
            "zbv",
            "--forward 1.5,1.5,2,2 --input 0,2,1.5,1.5 --weight 4,2,1.5,1.5",
            json!(["split"]),
        ),
    ] {
        for microbatches in ["4", "12"] {
            let compare = [
                "compare",
                name,
                "--from",
                from,
                "--microbatches",
                microbatches,
            ];
            let alone = [
                "simulate",
                name,
                "--ranks",
                "2",
                "--microbatches",
                microbatches,
            ];
            let (compared, alone) = (
                json_of(&compare),
                json_of(&[&alone[..], &words(costs)].concat()),
            );
            let of = &compared["schedules"][0];
            assert_eq!(of["makespan"], alone["makespan"], "{name} from {from}");
            assert_eq!(
                (&of["estimated"], &compared["fastest"]),
                (&estimated, &json!(name)),
                "{from}"
            );
        }
    }
}

#[test]
fn the_fastest_schedule_for_a_training_is_named_and_those_that_keep_too_much_are_left_out() {
    let folder = folder("schedule_fastest");
    let parts = folder.write("parts.json", &in_parts());
    let parts = parts.to_str().unwrap();
    let all = text(&["compare", "--from", parts, "--memory", "3"]);
    let kept = "left out: gpipe keeps 4 activations on a rank, and --memory allows 3";
    assert_has(
        &all,
        &[
            "parts.json: 4 stages on 2 ranks by zbv, times in ms",
            kept,
            "  1f1b (estimated: split)\n",
        ],
    );
    let compared = json_of(&["compare", "--from", parts]);
    let makespan = |of: &Value| of["makespan"].as_f64().unwrap();
    let rows = compared["schedules"].as_array().unwrap();
    let least = rows.iter().map(makespan).reduce(f64::min).unwrap();
    let fastest = rows
        .iter()
        .find(|of| of["name"] == compared["fastest"])
        .unwrap();
    assert_eq!((makespan(fastest), rows.len()), (least, Kind::ALL.len()));
    assert!(
        all.ends_with(&format!(
            "fastest: {}\n",
            compared["fastest"].as_str().unwrap()
        )),
        "{all}"
    );
}

#[test]
fn a_report_without_times_of_a_training_is_refused_with_the_remedy() {
    let folder = folder("schedule_from_bad");
    let unknown = [const { Value::Null }; 4];
    let plain = br#"{"schema": 2, "measures": {}}"#;
    for (file, code, told) in [
        (
            &report(2, "zbv", &[unknown])[..],
            3,
            &["not measured", "timing=True"][..],
        ),
        (plain, 3, &["did not train", "Trainer"]),
        (b"{", 3, &["no report"]),
    ] {
        let path = folder.write("bad.json", file);
        let ended = schedule(&["compare", "--from", path.to_str().unwrap()]);
        ended.failed(code, &[&["bad.json"], told].concat());
    }
    schedule(&["compare", "--from", "missing.json"]).failed(4, &["missing.json"]);
}

#[test]
fn the_pages_show_what_the_commands_print() {
    const PAGE: &str = concat!(
        include_str!("../../../../docs/schedules.md"),
        include_str!("../../../../docs/1f1b.md")
    );
    let folder = folder("schedule_page");
    let mut commands = 0;
    let lines = PAGE
        .lines()
        .filter_map(|line| line.strip_prefix("    pp schedule "));
    for line in lines {
        let command = line.split('#').next().unwrap();
        let (command, to) = command.split_once('>').unwrap_or((command, ""));
        let args: Vec<&str> = ["schedule"]
            .into_iter()
            .chain(command.split_whitespace())
            .collect();
        let ended = run(pp(&args).current_dir(folder.file("")), None).succeeded();
        commands += 1;
        if !to.is_empty() {
            folder.write(to.trim(), &ended.stdout);
        }
        let is_shown = ["check mine.csv", "compare --ranks 4 --microbatches 8"].contains(&line);
        if is_shown || line.starts_with("simulate ") {
            let printed = String::from_utf8(ended.stdout).unwrap();
            let indented: String = printed
                .lines()
                .map(|line| format!("    {line}\n"))
                .collect();
            assert!(PAGE.contains(&indented), "not on the page:\n{indented}");
        }
    }
    assert_eq!(commands, 10);
}
