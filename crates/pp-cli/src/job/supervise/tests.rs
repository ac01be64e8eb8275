//! A job under supervision, without ranks of its own.

use super::*;

/// The report that the ranks have met and the end of Phase B come by two threads.
#[test]
fn a_phase_b_that_ended_before_the_front_was_heard_may_still_be_missed() {
    for program in ["true", "false"] {
        let (_, report) = rustix::pipe::pipe().unwrap();
        let (events, _happened) = mpsc::channel();
        let within = Duration::from_secs(3600);
        let mut job = Job::new(report, events, 1, within).unwrap();
        job.running[FRONT.get() as usize] = Some(rustix::process::getpid());
        let child = Command::new(program).spawn().unwrap();
        job.ended(PHASE_B, child).unwrap();
        assert!(job.ends.is_empty() && job.deadline.is_none(), "{program}");
        assert!(job.gone.is_some(), "{program}");
    }
}

/// A Phase B that ended before the ranks met used up the restart, and the front does not know of it.
#[test]
fn a_front_that_asks_for_one_restart_too_many_gives_the_reason() {
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    let (events, _happened) = mpsc::channel();
    let mut job = Job::new(pipe, events, 1, Duration::from_secs(3600)).unwrap();
    let start = |program: &str| Command::new(program).arg("60").spawn().unwrap();
    let mut front = start("sleep");
    let pid = Pid::from_child(&front);
    job.running[FRONT.get() as usize] = Some(pid);
    job.used = 1;
    job.ended(PHASE_B, start("true")).unwrap();
    let fault = Fault::new(FaultKind::PeerDied, PHASE_B, "run", "the connection ended");
    let word = Word::Lost(Meant::Unknown, fault);
    let (rank, pid) = (FRONT, number(pid));
    job.reported(Report { pid, rank, word }).unwrap();
    assert!(job.deadline.is_some());
    job.is_killing = true;
    front.kill().unwrap();
    job.ended(FRONT, front).unwrap();
    let failure = verdict(&job.over()).unwrap_err();
    let words = "the connection ended; 1 of 1 restarts were used";
    assert!(failure.to_string().contains(words), "{failure}");
    assert_eq!(failure.code(), 7);
}

/// A kernel plugin wrote into the pipe on which ranks report.
#[test]
fn a_front_that_is_not_heard_any_more_has_done_its_work_if_it_ends_well() {
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    let (events, happened) = mpsc::channel();
    let mut job = Job::new(pipe, events.clone(), 0, Duration::from_secs(3600)).unwrap();
    events.send(Event::ReportsOver).unwrap();
    for rank in [FRONT, PHASE_B] {
        let child = Command::new("true").spawn().unwrap();
        events.send(Event::Ended(rank, child)).unwrap();
    }
    job.run(&happened).unwrap();
    verdict(&job.over()).unwrap();
}

#[test]
fn a_rank_that_was_killed_has_its_time_to_end() {
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    let (events, _happened) = mpsc::channel();
    let mut job = Job::new(pipe, events, 0, Duration::from_secs(3600)).unwrap();
    let due = Instant::now() + Duration::from_secs(3600);
    (job.is_killing, job.deadline) = (true, Some(due));
    let front = Command::new("false").spawn().unwrap();
    job.ended(FRONT, front).unwrap();
    assert_eq!(job.deadline, Some(due));
}

/// That the front needs it no more is read by another thread than its end.
#[test]
fn a_phase_b_that_crashed_when_it_was_needed_no_more_hurries_nobody() {
    let (_, pipe) = rustix::pipe::pipe().unwrap();
    let (events, _happened) = mpsc::channel();
    let mut job = Job::new(pipe, events, 0, Duration::from_secs(3600)).unwrap();
    let me = rustix::process::getpid();
    job.running[FRONT.get() as usize] = Some(me);
    job.ended(PHASE_B, Command::new("false").spawn().unwrap())
        .unwrap();
    assert!(job.deadline.is_some());
    let (rank, pid, word) = (FRONT, number(me), Word::Served);
    job.reported(Report { pid, rank, word }).unwrap();
    assert!(job.deadline.is_none());
}
