use super::*;

#[test]
fn a_skip_gives_the_chunks_of_the_whole_input_from_its_context_on() {
    let read = |skip, scene_cuts| {
        let options = SourceOptions {
            skip,
            scene_cuts,
            noise: Some(Noise::new(4.0, 3, Bits::Eight)),
            ..options()
        };
        drain(&mut start(Cursor::new(clip(35)), options))
    };
    for scene_cuts in [false, true] {
        let (whole, _) = read(Skip::default(), scene_cuts);
        for (frames, context) in (1..=35).flat_map(|n| [0, 1, 4, 7].map(|context| (n, context))) {
            let at = format!("--skip {frames}, context {context}, cuts {scene_cuts}");
            let (given, error) = read(Skip { frames, context }, scene_cuts);
            assert!(error.is_none(), "{at}");
            let (heads, given): (Vec<_>, Vec<_>) = given.into_iter().partition(|c| c.is_head);
            let rest = &whole[whole.len() - given.len()..];
            for (chunk, same) in given.iter().zip(rest) {
                let key = |c: &Chunk| (c.index, c.first_frame, c.data().to_vec());
                assert!(key(chunk) == key(same), "{at}");
            }
            assert!(!given[0].cut, "{at}");
            let has_frame = |c: &&Chunk| frames < c.first_frame + c.frames as u64;
            let counts = whole
                .iter()
                .find(has_frame)
                .unwrap_or(&whole[whole.len() - 1]);
            let begins_epoch =
                |c: &&Chunk| c.first_frame <= counts.first_frame && (c.cut || c.index == 0);
            let epoch = whole.iter().rfind(begins_epoch).unwrap();
            let first = given[0].first_frame;
            // No more chunks than hold the context.
            let counted = if frames == 35 { 35 } else { counts.first_frame };
            let is_enough = |first: u64| counted >= first + context;
            assert!(is_enough(first) || first == epoch.first_frame, "{at}");
            let second = first + given[0].frames as u64;
            assert!(first == counts.first_frame || !is_enough(second), "{at}");
            let heads: Vec<_> = heads.iter().map(|c| c.first_frame).collect();
            let expected = (first > epoch.first_frame).then_some(epoch.first_frame);
            assert_eq!(heads, Vec::from_iter(expected), "{at}");
        }
    }
    let skip = Skip {
        frames: 36,
        context: 0,
    };
    let (given, error) = read(skip, true);
    let error = error.unwrap().to_string();
    assert!(
        given.is_empty() && error.contains("35 frames are read, and --skip 36"),
        "{error}"
    );
}
