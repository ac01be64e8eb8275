//! `pp schedule`: what it prints, what it refuses and how it ends.

mod common;

use common::{folder, pp};
use pp_testing::process::{Ended, run};
use serde_json::{Value, json};

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
    let cases: [(&str, &str, &[&str], &[&str]); 6] = [
        (
            "check",
            "0F0,0W0,0I0\n",
            &[],
            &["0W0 (rank 0, action 2)", "0I0"],
        ),
        (
            "simulate",
            "0F0,0W0,0I0\n",
            &["--json"],
            &["0W0 (rank 0, action 2)", "0I0"],
        ),
        (
            "plot",
            "0F0,0W0,0I0\n",
            &[],
            &["0W0 (rank 0, action 2)", "0I0"],
        ),
        (
            "check",
            head_on,
            &["--slots", "0"],
            &["0SEND_F1 (rank 0, action 4)", "1SEND_B0"],
        ),
        ("show", head_on, &["--lowered"], &["rank 0", "0SEND_F0"]),
        (
            "show",
            "0F0,0B0,nonsense\n",
            &[],
            &["row 1, column 3", "nonsense"],
        ),
    ];
    for (command, rows, more, words) in cases {
        let path = folder.write("bad.csv", rows.as_bytes());
        let args = [&[command, path.to_str().unwrap()], more].concat();
        let words = [&["bad.csv"], words].concat();
        let ended = schedule(&args).failed(3, &words);
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
    let cases: [(&[&str], i32, &[&str]); 14] = [
        (&["show", "1f1b"], 2, &["1f1b", "--ranks", "--microbatches"]),
        (
            &["simulate", "dualpipe", "--ranks", "4"],
            2,
            &["dualpipe: no schedule of that name; did you mean dualpipe-v?"],
        ),
        (&["show", "hanayo"], 2, &["hanayo: ", "gpipe", "dualpipe-v"]),
        (
            &["check", file, "--ranks", "2"],
            2,
            &["--ranks", "leave out"],
        ),
        (
            &[
                "show",
                "interleaved",
                "--ranks",
                "4",
                "--stages-per-rank",
                "2",
                "--microbatches",
                "9",
            ],
            2,
            &["8", "10"],
        ),
        (
            &[
                "show",
                "zb-h1",
                "--ranks",
                "4",
                "--stages-per-rank",
                "2",
                "--microbatches",
                "8",
            ],
            2,
            &["zb-h1"],
        ),
        (
            &["show", "dualpipe-v", "--ranks", "4", "--microbatches", "7"],
            2,
            &["8"],
        ),
        (&["simulate", file, "--weight", "-1"], 2, &["--weight -1"]),
        (
            &["check", file, "--activation-bytes", "1.5"],
            2,
            &["--activation-bytes 1.5"],
        ),
        (
            &["plot", file, "--input", "0.1234567"],
            2,
            &["--input 0.1234567"],
        ),
        (
            &["plot", file, "--forward", "1,2"],
            2,
            &["2 numbers", "1 stages"],
        ),
        (
            &["plot", picture, "--output", picture],
            2,
            &["FILE.csv", "--output"],
        ),
        (
            &["plot", file, "--output", "mine.png"],
            2,
            &["--output mine.png", ".svg"],
        ),
        (&["check", missing.to_str().unwrap()], 4, &["missing.csv"]),
    ];
    for (args, code, words) in cases {
        schedule(args).failed(code, words);
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
    let lowered = text(&[
        "show",
        "gpipe",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--lowered",
        "--csv",
    ]);
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
    let bare = [
        "show",
        "gpipe",
        "--ranks",
        "2",
        "--microbatches",
        "2",
        "--csv",
    ];
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
    let size = [
        "--ranks",
        "2",
        "--stages-per-rank",
        "2",
        "--microbatches",
        "4",
    ];
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
    let size = "--ranks 6 --stages-per-rank 2 --microbatches 1 --lowered --csv";
    let args: Vec<&str> = ["show", "looped-bfs"]
        .into_iter()
        .chain(size.split(' '))
        .collect();
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
    let args = [
        "plot",
        "zbv",
        "--ranks",
        "2",
        "--microbatches",
        "4",
        "--output",
        picture.to_str().unwrap(),
    ];
    assert_eq!(text(&args), "");
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
fn the_pages_show_what_the_commands_print() {
    const PAGE: &str = concat!(
        include_str!("../../../docs/schedules.md"),
        include_str!("../../../docs/1f1b.md")
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
        if line == "check mine.csv" || line.starts_with("simulate ") && line.contains("--forward") {
            let printed = String::from_utf8(ended.stdout).unwrap();
            let indented: String = printed
                .lines()
                .map(|line| format!("    {line}\n"))
                .collect();
            assert!(PAGE.contains(&indented), "not on the page:\n{indented}");
        }
    }
    assert_eq!(commands, 9);
    // The table of schedules: name, name in PyTorch, stages a rank, figures.
    let table = PAGE.lines().filter(|line| line.matches('|').count() == 9);
    let rows = table.filter_map(|line| line.strip_prefix("| `"));
    let rows: Vec<Vec<&str>> = rows
        .map(|row| row.split('|').map(str::trim).collect())
        .collect();
    assert_eq!(rows.len(), 9);
    for row in rows {
        let name = row[0].trim_matches('`');
        let size = [&SIZE[..], &["--stages-per-rank", row[2]]].concat();
        let simulated = json_of(&[&["simulate", name], &size[..]].concat());
        let (makespan, idle) = (&simulated["makespan"], &simulated["idle"][0]);
        let over =
            makespan.as_f64().unwrap() / (makespan.as_f64().unwrap() - idle.as_f64().unwrap());
        let list = |key: &str| match simulated[key].as_array().unwrap() {
            list if list.iter().all(|of| *of == 0) => "0".to_owned(),
            list => list
                .iter()
                .map(Value::to_string)
                .collect::<Vec<_>>()
                .join(", "),
        };
        let figures = [
            format!("{over:.3}"),
            format!("{idle} of {makespan}"),
            list("activation_slots"),
            list("undone_weights"),
            simulated["slots_per_edge"].to_string(),
        ];
        assert_eq!(row[3..8], figures, "{name}");
    }
}
