//! The notation of a pipeline: what it means, how it is printed, and what is refused.

use pp_contract::Rank;
use pp_contract::pipeline::{EdgeKind, Laps, Pipeline};
use pp_testing::rows;
use proptest::prelude::*;

fn parse(text: &str) -> Pipeline {
    text.parse()
        .unwrap_or_else(|error| panic!("{text}: {error}"))
}

/// All edges as text: kind, stages, ranks.
fn edges(text: &str) -> Vec<String> {
    let edges = parse(text);
    let kind = |kind| match kind {
        EdgeKind::Onward => "onward",
        EdgeKind::Lap => "lap",
        EdgeKind::Follow => "follow",
        EdgeKind::Report => "report",
        EdgeKind::Accept => "accept",
    };
    let edge = |edge: pp_contract::pipeline::EdgeSpec| {
        let (from, to) = (edge.from, edge.to);
        format!(
            "{} {from}>{to} {}>{}",
            kind(edge.kind),
            edge.source,
            edge.target
        )
    };
    edges.edges().map(edge).collect()
}

#[test]
fn text_is_printed_in_one_way() {
    for (text, canonical) in [
        (
            "encode@0,phase_b@1,decode@0",
            "encode@0 -> phase_b@1 -> decode@0",
        ),
        (" a@0->b@0+01 ,c@0 ", "a@0 -> b@0+1 -> c@0"),
        (
            "a@0 -> ( b@1 -> c@2 ) * steps -> d@3",
            "a@0 -> (b@1 -> c@2)*steps -> d@3",
        ),
        (
            "a@0,(b@1)*65535,(c@0,d@1)*1,e2_@0",
            "a@0 -> (b@1)*65535 -> (c@0 -> d@1)*1 -> e2_@0",
        ),
    ] {
        assert_eq!(parse(text).to_string(), canonical);
        assert_eq!(parse(canonical), parse(text));
        assert_eq!(parse(canonical).digest(), parse(text).digest());
    }
}

#[test]
fn all_ranks_but_those_of_source_and_sink_may_be_started_again() {
    for (text, ranks) in [
        ("a@0,b@0,c@0", &[][..]),
        ("a@0,b@0,c@1", &[]),
        ("a@0,b@1,b@0,b@1,c@2", &[1]),
        ("a@0,b@1,b@2,b@3,c@2", &[1, 3]),
        ("a@0,b@0+1,c@0", &[1]),
        ("a@0,b@1+2+3,c@1", &[2, 3]),
        ("a@0,(b@1,b@2)*2,c@0", &[1, 2]),
    ] {
        let pipeline = parse(text);
        let restartable: Vec<u32> = pipeline.restartable().map(Rank::get).collect();
        assert_eq!(restartable, ranks, "{text}");
    }
}

#[test]
fn edges_follow_from_the_text() {
    assert_eq!(
        edges("a@0 -> b@1 -> c@0"),
        ["onward 0>1 0>1", "onward 1>2 1>0"]
    );
    assert_eq!(edges("a@0 -> b@0 -> c@0"), [""; 0]);
    assert_eq!(
        edges("a@0 -> b@0 -> b@1 -> c@1"),
        ["onward 1>2 0>1", "accept 3>0 1>0"]
    );
    assert_eq!(
        edges("a@0 -> b@2+0+1 -> c@0"),
        [
            "onward 0>1 0>2",
            "onward 1>2 2>0",
            "follow 1>1 2>0",
            "report 1>1 0>2",
            "follow 1>1 2>1",
            "report 1>1 1>2"
        ]
    );
    assert_eq!(
        edges("a@0 -> (b@1 -> c@2)*steps -> d@3"),
        [
            "onward 0>1 0>1",
            "onward 1>2 1>2",
            "onward 2>3 2>3",
            "lap 2>1 2>1",
            "accept 3>0 3>0"
        ]
    );
}

#[test]
fn parts_are_counted_in_order_of_the_text() {
    let pipeline = parse("a@0 -> b@1 -> (c@0 -> b@0)*2 -> b@1+0 -> d@0");
    let parts: Vec<_> = pipeline
        .stages()
        .iter()
        .map(|stage| (stage.part, stage.parts))
        .collect();
    assert_eq!(parts, [(0, 1), (0, 3), (0, 1), (1, 3), (2, 3), (0, 1)]);
    let at_0: Vec<_> = pipeline.stages_at(Rank::new(0)).map(|(at, _)| at).collect();
    assert_eq!(at_0, [0, 2, 3, 4, 5]);
    assert_eq!(pipeline.rings()[0].laps, Laps::Fixed(2));
    assert_eq!(pipeline.sink(), Rank::new(0));
}

#[test]
fn default_depth_is_two_and_the_payload_edges_and_the_groups_and_bounded() {
    let longest: Vec<_> = (0..256).map(|at| format!("s{at}@{}", at % 64)).collect();
    for (text, depth) in [
        (&*longest.join(","), 256),
        ("a@0 -> b@1 -> c@0", 4),
        ("a@0 -> b@0 -> c@0", 2),
        ("a@0 -> b@0+1 -> c@0", 3),
        ("a@0 -> b@0+1 -> c@1", 4),
        ("a@0 -> (b@1 -> c@2)*9 -> d@3", 6),
    ] {
        assert_eq!(parse(text).default_depth(), depth, "{text}");
    }
}

#[test]
fn bad_text_is_refused_with_place_and_remedy() {
    let many = |stage: &str, n| vec![stage; n].join(",");
    let long = format!("a@0,{}@0", "b".repeat(33));
    let stages = format!("a@0,{},c@0", many("b@0", 255));
    for [text, position, problem] in rows("
         | 1 | the text ends; write a stage
        a@0 | 1 | the only stage
        a@0 -> | 7 | the text ends; write a stage
        a@0- | 4 | quote it: the shell took the >
        a@0 - | 5 | quote it: the shell took the >
        a@0 - b@1 | 5 | found '-'; write '->'
        a@0,B@1 | 5 | found 'B'; write a stage
        a@0,_b@1 | 5 | begins with a letter
        a@0,ä@1,b@0 | 5 | found 'ä'
        a@0,b | 6 | write '@' and the rank of b
        a@0,b@x,c@0 | 7 | write a rank
        a@0,b@64,c@0 | 7 | rank 64 is over 63
        a@0,b@99999999999,c@0 | 7 | over 63
        a@0,b@1+1,c@0 | 9 | rank 1 stands twice in the group of b
        a@0,b@1+0,c@0+1,d@0 | 11 | rank 0 is in the groups b@1+0 and c@0+1, which could wait for each other for ever; give the stage c one rank,
        a@0,b@0+1,b@0+1,c@0 | 11 | rank 0 is in the groups b@0+1 and b@0+1, which
        // One rank in common, and another way between the others.
        a@0,b@1+2,c@2+3,d@1,e@3 | 11 | rank 2 is in the groups b@1+2 and c@2+3, which
        a@0,b@0+1,c@2+3,d@4+3,e@0 | 17 | rank 3 is in the groups c@2+3 and d@4+3, which
        a@0,b@1+,c@0 | 9 | write a rank
        a@0,b@1+2,c@0,(d@1+2)*2,e@0 | 16 | the group of d stands in a ring
        a@0,(b@1,(c@2)*2)*2,d@0 | 10 | a ring stands in a ring
        a@0,(b@1,c@0 | 13 | write '->', ',' or ')'
        a@0,(b@1),c@0 | 10 | write '*steps'
        a@0,(b@1)*,c@0 | 11 | write 'steps' or the number
        a@0,(b@1)*0,c@0 | 11 | cannot be walked '0' times
        a@0,(b@1)*65536,c@0 | 11 | cannot be walked '65536' times; write 'steps', or a number from 1 to 65535
        a@0,(b@1)*step,c@0 | 11 | cannot be walked 'step' times
        a@0+1,b@1 | 1 | the source and stands on 2 ranks
        a@1,b@0 | 1 | the source stands on rank 0
        a@0,b@0+1 | 5 | the sink and stands on 2 ranks
        (a@0)*2,b@1 | 2 | the source and stands in a ring
        a@0,(b@1)*2 | 6 | the sink and stands in a ring
        a@0,a@1,b@0 | 5 | the source and stands here too
        a@0,b@1,b@0 | 5 | the sink and stands here too
        a@0,b@2,c@0 | 5 | rank 1 has no stage
        LONG | 5 | over 32 bytes
        STAGES | 1025 | one stage more than 256
    ") {
        let text = &text.replace("LONG", &long).replace("STAGES", &stages);
        let error = text.parse::<Pipeline>().expect_err(text);
        assert_eq!(error.position.to_string(), position, "{text}: {error}");
        assert!(error.problem.contains(problem), "{text}: {error}");
    }
}

proptest! {
    #[test]
    fn no_text_panics_and_what_is_taken_is_printed_back(text in "[ab@0-2+,() *>-]{0,24}|[a-c]@0(,[d-f]@[0-2](\\+[0-2])?){0,4}(,\\([d-f]@[01],g@[01]\\)\\*(steps|[1-9]))?,z@[01]") {
        if let Ok(pipeline) = text.parse::<Pipeline>() {
            prop_assert_eq!(pipeline.to_string().parse::<Pipeline>(), Ok(pipeline));
        }
    }
}
