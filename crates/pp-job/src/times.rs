//! How long this crate waits, and how often it looks, as `pp_transport::times` is for its crate. What the user sets
//! stands in `config`.

use std::time::Duration;

use pp_transport::times::ENDED_WITHIN;

/// Time a driver has to end after a fault before its process is ended under it: outside a stage it ends
/// within milliseconds.
pub(crate) const GRACE: Duration = Duration::from_millis(200);
/// A writer of a recording waits for another one of its process: both have the grace between them.
pub(crate) const TURN_WITHIN: Duration = Duration::from_millis(GRACE.as_millis() as u64 / 2);
/// A process that ends removes the files that it did not finish: a disk that hangs must not hold it.
pub(crate) const DISCARDED_WITHIN: Duration = Duration::from_millis(200);
/// A process that is ended says why and removes its files. All of it passes only if no program reads standard error, or
/// if the machine is so busy that a thread waits.
pub(crate) const EXIT_WITHIN: Duration =
    DISCARDED_WITHIN.saturating_add(Duration::from_millis(300));
/// The last line of a process, where the reader of standard error is slow, or stuck.
pub(crate) const SAID_WITHIN: Duration = Duration::from_secs(2);
/// Repeats of a signal within this time count as one: `timeout` signals a process and then its group, at once.
pub(crate) const ECHO_WITHIN: Duration = Duration::from_millis(50);

/// A signal after the end of a job was meant for the job: a user who asks twice asks within this.
pub(crate) const MEANT_FOR_JOB_WITHIN: Duration = Duration::from_secs(1);

/// Time between two signs of life: often enough to be missed within seconds, and no load.
pub(crate) const BEAT_EVERY: Duration = Duration::from_secs(1);
/// Silence of a rank that is missed: a busy machine holds up a thread for less than five signs of life.
pub(crate) const MISSED_AFTER: Duration = BEAT_EVERY.saturating_mul(5);
/// A program that was named by `Job::command` loads, such as an interpreter with its libraries, before it comes to its job.
pub(crate) const LOADED_WITHIN: Duration = Duration::from_secs(600);
/// The supervisor reads a report that may be there already: that rank 0 is there after all, where another rank ended
/// because of it or while rank 0 waits for it.
pub(crate) const CONTRADICTED_WITHIN: Duration = Duration::from_secs(1);
/// The other ranks end by themselves after one ended badly: each takes its grace, and some time to notice.
pub(crate) const PATIENCE: Duration = GRACE.saturating_add(Duration::from_millis(40));
/// The other ranks end after rank 0 ended well: the drop of an edge may take all of its time.
pub(crate) const GOODBYE: Duration = ENDED_WITHIN.saturating_add(Duration::from_secs(2));
/// A rank whose program goes on behind the job leaves it after rank 0 ended well, however busy the machine is: what is killed
/// then is told as lost.
pub(crate) const LEFT_WITHIN: Duration = Duration::from_secs(30);
/// The ranks end by themselves after a second interrupt. The user waits for that.
pub(crate) const ABORTED_WITHIN: Duration = Duration::from_secs(1);
/// A process that was killed ends, once the kernel is done with a disk or a device in it; also a bound for the thread that
/// reads the last reports, which are in the pipe.
pub(crate) const KILLED_WITHIN: Duration = Duration::from_secs(10);

/// Time between two times that the queue of records is emptied while the job has no viewer.
pub(crate) const DRAINED_EVERY: Duration = Duration::from_millis(100);
/// Time between two snapshots, two pictures, and two messages of vital signs.
pub(crate) const SEEN_EVERY: Duration = Duration::from_secs(1);
/// A viewer that takes no byte of a waiting line for so long is dropped.
pub(crate) const STUCK_VIEWER: Duration = Duration::from_secs(5);
/// Time in which a viewer must take the last snapshot.
pub(crate) const LAST_TAKEN_WITHIN: Duration = Duration::from_millis(50);
/// How long the end of a job waits for the thread that writes it. That has a low priority: on a busy machine its turn comes late.
pub(crate) const LAST_SEEN_WITHIN: Duration = Duration::from_secs(1);
/// How long a process that ends at once waits until its viewers have left. It has much to do behind that.
pub(crate) const LEFT_ALONE_WITHIN: Duration = Duration::from_millis(200);

/// Time between two lines of a rank that waits for another: the user may have forgotten to start one.
pub(crate) const TELL_EVERY: Duration = Duration::from_secs(5);
/// Time between two such lines where a supervisor watches the ranks, which may load for long.
pub(crate) const TELL_EVERY_SUPERVISED: Duration = Duration::from_secs(60);
/// One step of setting up, mapping memory or the first connection of a machine, which reads its topology, included.
pub(crate) const SET_UP_WITHIN: Duration = Duration::from_secs(30);
/// A call of the transport, which issues work and returns: one that takes this long hangs.
pub(crate) const ISSUED_WITHIN: Duration = Duration::from_secs(10);
/// The abort of all edges and groups of a rank; measured with GPUs: half a second.
pub(crate) const EDGES_ABORTED_WITHIN: Duration = Duration::from_secs(5);
/// Time between two looks at what another thread does.
pub(crate) const LOOK_EVERY: Duration = Duration::from_millis(1);
