//! What a flight recorder tells of payloads that are kept for a restart.

use pp_contract::Generation;
use pp_runtime::driver::{Driven, FrontRun, run_phase_b};
use pp_testing::Pair;
use pp_transport::bell::Bell;
use pp_transport::flight::{FlightRecorder, Message, Recorded, State};

use crate::stages::{Front, Mixer};
use crate::{FRONT, PHASE_B, SIX, TellPanic, options, pair};

#[test]
fn a_send_that_is_kept_is_recorded_as_done() {
    let mut stages = Front::new(&SIX);
    let options = options(1, 2);
    let Pair {
        front: link,
        back,
        front_switch: switch,
        back_switch,
    } = pair(options, &Bell::new().unwrap());
    let recorder = FlightRecorder::new(64);
    let link = Recorded::new(link, &recorder, PHASE_B, Generation::new(0));
    let mut front = FrontRun::new(&mut stages, options);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let ended = run_phase_b(back, &mut Mixer::default(), &back_switch, FRONT, 2);
            ended.unwrap();
        });
        let _tell = TellPanic(&back_switch);
        assert_eq!(front.drive(link, &switch), Ok(Driven::Finished));
    });
    drop(front);
    let (operations, _) = recorder.operations();
    let sends = operations.iter();
    let sends = sends.filter(|send| send.message == Some(Message::Envelope));
    let states: Vec<State> = sends.map(|send| send.state).collect();
    // That the last slot came back may be seen too late.
    assert_eq!(states[..SIX.len() - 1], [State::Done; SIX.len() - 1]);
}
