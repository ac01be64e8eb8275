//! The right to issue NCCL calls on a device.
//!
//! Hazard: two threads may not call NCCL for communicators of one device, not even for different communicators. The
//! calls race, or two ranks issue in different orders and hang. Guarantee: each device has one issuer in a process,
//! bound to the thread that first issues with it. A call from any other thread is an error before NCCL sees it. A call
//! from the right thread is an error too while another thread makes or ends communicators. That state can be permanent
//! if the other thread hangs in NCCL.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nccl_sys::Nccl;

use crate::gpu::Turn;
use pp_device::Device;
use pp_edges::backend::Connect;
use pp_edges::error::TransportError;

/// The devices of this process that have an issuer.
static TAKEN: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// How long a caller waits for a connection.
pub(super) struct ConnectWait<'a> {
    pub(super) deadline: Instant,
    pub(super) is_wanted: &'a dyn Fn() -> bool,
}

impl<'a> ConnectWait<'a> {
    pub(super) fn of(how: Connect<'a>) -> Self {
        Self {
            deadline: how.deadline,
            is_wanted: how.is_wanted,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        Instant::now() >= self.deadline || !(self.is_wanted)()
    }

    /// Returns the time until the next check whether the connection is still wanted.
    pub(super) fn nap(&self) -> Duration {
        let left = self.deadline.saturating_duration_since(Instant::now());
        left.min(crate::times::WANTED_LOOK_EVERY)
    }
}

/// The right to issue NCCL operations on one device. It can move to another thread, but two threads cannot use it.
///
/// # If dropped
/// Another issuer can take the device once nothing that was made with this one is left.
#[derive(Debug)]
pub struct Issuer {
    pub(super) core: Arc<Core>,
    claim: Arc<Claim>,
    /// Makes it `!Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Issuer {
    /// Opens the issuer of this device.
    ///
    /// # Errors
    /// [`TransportError::DeviceTaken`] if this process already has an issuer for the device.
    pub fn open(nccl: &Nccl, device: &Device) -> Result<Self, TransportError> {
        let ordinal = device.about().ordinal;
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.contains(&ordinal) {
            return Err(TransportError::DeviceTaken { ordinal });
        }
        taken.push(ordinal);
        let claim = Arc::new(Claim { ordinal });
        let core = Arc::new(Core {
            nccl: nccl.clone(),
            device: device.clone(),
            claim: Arc::downgrade(&claim),
            thread: AtomicU64::new(NOBODY),
            users: Mutex::new(0),
            inside: AtomicBool::new(false),
            others: AtomicUsize::new(0),
        });
        Ok(Self {
            core,
            claim,
            one_thread: PhantomData,
        })
    }

    /// Returns another handle for the same thread, such as for a group beside edges.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            core: Arc::clone(&self.core),
            claim: Arc::clone(&self.claim),
            one_thread: PhantomData,
        }
    }

    /// Returns the device of this issuer.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// Returns the library of this issuer.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.core.nccl
    }
}

/// Marks a device as taken. Issuers, edges, communicators and the threads that make or end them hold it. Leases do not,
/// since nothing is issued through a lease.
#[derive(Debug)]
struct Claim {
    ordinal: u32,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        taken.retain(|ordinal| *ordinal != self.ordinal);
    }
}

const NOBODY: u64 = 0;

thread_local! {
    static THIS_THREAD: u64 = {
        static NEXT: AtomicU64 = AtomicU64::new(NOBODY + 1);
        NEXT.fetch_add(1, Ordering::Relaxed)
    };
}

/// The state that all handles of an issuer share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) nccl: Nccl,
    pub(super) device: Device,
    claim: Weak<Claim>,
    /// The thread that issues, once there is one.
    thread: AtomicU64,
    /// The number of edges and communicators. When the last one goes, another thread may issue. The lock covers that
    /// change, so that the thread of a new edge is not unbound by mistake.
    users: Mutex<usize>,
    /// Set while the thread that issues is in a call.
    inside: AtomicBool,
    /// The number of other threads that make or end communicators.
    others: AtomicUsize,
}

impl Core {
    /// Begins a call from the thread that issues, with the device's context bound.
    ///
    /// # Errors
    /// [`TransportError::WrongThread`] if another thread issues, or a thread makes or ends communicators; the context
    /// cannot be bound.
    #[inline]
    pub(super) fn enter(&self) -> Result<Turn<'_>, TransportError> {
        let this = THIS_THREAD.with(|this| *this);
        if self.thread.load(Ordering::Relaxed) != this {
            self.thread
                .compare_exchange(NOBODY, this, Ordering::AcqRel, Ordering::Relaxed)
                .map_err(|_| self.wrong_thread())?;
        }
        self.device.bind()?;
        // This store is sequentially consistent. So are the marks of an abort or of a second thread, and their load of
        // this flag. Either the caller sees the mark, or the other thread sees the caller.
        self.inside.store(true, Ordering::SeqCst);
        let turn = Turn(Some(&self.inside));
        if self.others.load(Ordering::SeqCst) > 0 {
            return Err(self.wrong_thread());
        }
        Ok(turn)
    }

    #[cold]
    fn wrong_thread(&self) -> TransportError {
        TransportError::WrongThread {
            ordinal: self.device.about().ordinal,
        }
    }

    /// Reserves the device for a second thread that makes the communicators `what`, while the calling thread stands
    /// aside. Waits for threads that still make or end other communicators.
    ///
    /// # Errors
    /// [`TransportError::WrongThread`] if another thread issues; [`TransportError::NotInTime`].
    pub(super) fn enter_to_connect(
        self: &Arc<Self>,
        what: &str,
        wait: &ConnectWait<'_>,
    ) -> Result<SecondThread, TransportError> {
        let this = THIS_THREAD.with(|this| *this);
        let started = Instant::now();
        let order = Ordering::SeqCst;
        while self.others.compare_exchange(0, 1, order, order).is_err() {
            if wait.is_over() {
                return Err(TransportError::NotInTime {
                    what: what.to_owned(),
                    step: "wait for the thread that makes or ends other communicators",
                    after: started.elapsed(),
                });
            }
            std::thread::sleep(crate::times::LOOK_EVERY);
        }
        let second = self.marked();
        let thread = self.thread.load(Ordering::Relaxed);
        let may = thread == NOBODY || thread == this;
        if !may || self.inside.load(Ordering::SeqCst) {
            return Err(self.wrong_thread());
        }
        Ok(second)
    }

    /// Marks that a second thread calls into NCCL to end communicators. This never waits, since only ending them frees
    /// a thread that hangs.
    pub(super) fn enter_to_end(self: &Arc<Self>) -> SecondThread {
        self.others.fetch_add(1, Ordering::SeqCst);
        self.marked()
    }

    fn marked(self: &Arc<Self>) -> SecondThread {
        SecondThread {
            core: Arc::clone(self),
            _claim: self.claim.upgrade(),
        }
    }

    fn users(&self) -> MutexGuard<'_, usize> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells whether the thread that issues is in a call.
    pub(super) fn is_inside(&self) -> bool {
        self.inside.load(Ordering::SeqCst)
    }
}

/// Marks that a second thread is in NCCL. That thread owns the mark, so the mark lasts as long as the thread does, even
/// if no caller waits for it any more.
#[derive(Debug)]
pub(super) struct SecondThread {
    core: Arc<Core>,
    _claim: Option<Arc<Claim>>,
}

impl Drop for SecondThread {
    fn drop(&mut self) {
        self.core.others.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Counts an edge or a communicator that uses the issuer.
#[derive(Debug)]
pub(super) struct IssuerUser(Issuer);

impl IssuerUser {
    pub(super) fn new(issuer: &Issuer) -> Self {
        *issuer.core.users() += 1;
        Self(issuer.share())
    }
}

impl Drop for IssuerUser {
    fn drop(&mut self) {
        let mut users = self.0.core.users();
        *users -= 1;
        if *users == 0 {
            self.0.core.thread.store(NOBODY, Ordering::Release);
        }
    }
}
