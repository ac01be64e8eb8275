//! The right to issue on a device.
//!
//! Hazard: NCCL may not be called by two threads for communicators of one device, not even of
//! different ones; the calls race, or the two ranks issue in different orders and hang.
//! Guarantee: one issuer per device and process, bound to the thread that first issues with it;
//! a call from any other thread is an error before NCCL sees it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nccl_sys::Nccl;

use crate::cuda::Device;
use crate::error::TransportError;

/// How long an abort waits for a call that is under way: those that are not stuck take
/// microseconds.
const CALL_ENDS_WITHIN: Duration = Duration::from_millis(100);

/// Devices of this process that have an issuer.
static TAKEN: Mutex<Vec<u32>> = Mutex::new(Vec::new());

/// The right to issue NCCL operations on one device. It can move to another thread, and cannot be
/// used from two.
///
/// # If dropped
/// The device is free for another issuer once nothing that was made with it is left.
#[derive(Debug)]
pub struct Issuer {
    core: Arc<Core>,
    claim: Arc<Claim>,
    /// Makes it `!Sync`.
    one_thread: PhantomData<Cell<()>>,
}

impl Issuer {
    /// The issuer of this device.
    ///
    /// # Errors
    /// [`TransportError::DeviceTaken`] when this process has one already.
    pub fn open(nccl: &Nccl, device: &Device) -> Result<Self, TransportError> {
        let ordinal = device.about().ordinal;
        let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.contains(&ordinal) {
            return Err(TransportError::DeviceTaken { ordinal });
        }
        taken.push(ordinal);
        let core = Arc::new(Core {
            nccl: nccl.clone(),
            device: device.clone(),
            thread: AtomicU64::new(NOBODY),
            tenants: AtomicUsize::new(0),
            inside: AtomicBool::new(false),
            connecting: AtomicBool::new(false),
        });
        Ok(Self {
            core,
            claim: Arc::new(Claim { ordinal }),
            one_thread: PhantomData,
        })
    }

    /// Another handle for the same thread: a group beside a link.
    #[must_use]
    pub fn share(&self) -> Self {
        Self {
            core: Arc::clone(&self.core),
            claim: Arc::clone(&self.claim),
            one_thread: PhantomData,
        }
    }

    /// The device it issues on.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.core.device
    }

    /// The library it calls.
    #[must_use]
    pub fn nccl(&self) -> &Nccl {
        &self.core.nccl
    }

    pub(super) fn core(&self) -> &Arc<Core> {
        &self.core
    }
}

/// A device that is taken. Held by issuers, links and communicators; leases that outlive them do
/// not count, since nothing is issued through a lease.
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

/// What all handles of an issuer share.
#[derive(Debug)]
pub(super) struct Core {
    pub(super) nccl: Nccl,
    pub(super) device: Device,
    /// The thread that issues, once one has.
    thread: AtomicU64,
    /// Links and communicators there are; with the last the thread is free to change.
    tenants: AtomicUsize,
    /// A call into NCCL is under way.
    inside: AtomicBool,
    /// A thread makes communicators, and the one that issues waits for it.
    connecting: AtomicBool,
}

impl Core {
    /// Begins a call: from the thread that issues, with the context bound.
    ///
    /// # Errors
    /// [`TransportError::WrongThread`]; the context cannot be bound.
    #[inline]
    pub(super) fn enter(&self) -> Result<Turn<'_>, TransportError> {
        let this = THIS_THREAD.with(|this| *this);
        if self.thread.load(Ordering::Relaxed) != this {
            self.thread
                .compare_exchange(NOBODY, this, Ordering::AcqRel, Ordering::Relaxed)
                .map_err(|_| TransportError::WrongThread {
                    ordinal: self.device.about().ordinal,
                })?;
        }
        self.device.bind()?;
        // Sequentially consistent, as are the mark of an abort and its look at this: either the
        // caller sees the mark, or the abort sees the caller.
        self.inside.store(true, Ordering::SeqCst);
        Ok(Turn(self))
    }

    /// Lets the calling thread stand aside while another makes communicators for it.
    ///
    /// # Errors
    /// [`TransportError::WrongThread`] when another thread issues, or makes communicators.
    pub(super) fn enter_to_connect(&self) -> Result<Connecting<'_>, TransportError> {
        let this = THIS_THREAD.with(|this| *this);
        let thread = self.thread.load(Ordering::Relaxed);
        let may = thread == NOBODY || thread == this;
        if !may || self.connecting.swap(true, Ordering::AcqRel) {
            return Err(TransportError::WrongThread {
                ordinal: self.device.about().ordinal,
            });
        }
        Ok(Connecting(self))
    }

    /// Waits, not for long, until no call is under way.
    pub(super) fn wait_outside(&self) {
        let start = Instant::now();
        while self.inside.load(Ordering::SeqCst) && start.elapsed() < CALL_ENDS_WITHIN {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
}

/// A call under way.
#[derive(Debug)]
pub(super) struct Turn<'a>(&'a Core);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.inside.store(false, Ordering::Release);
    }
}

/// Communicators are being made.
#[derive(Debug)]
pub(super) struct Connecting<'a>(&'a Core);

impl Drop for Connecting<'_> {
    fn drop(&mut self) {
        self.0.connecting.store(false, Ordering::Release);
    }
}

/// A link or a communicator that uses the issuer.
#[derive(Debug)]
pub(super) struct Tenant {
    core: Arc<Core>,
    _claim: Arc<Claim>,
}

impl Tenant {
    pub(super) fn new(issuer: &Issuer) -> Self {
        issuer.core.tenants.fetch_add(1, Ordering::AcqRel);
        Self {
            core: Arc::clone(&issuer.core),
            _claim: Arc::clone(&issuer.claim),
        }
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        if self.core.tenants.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.core.thread.store(NOBODY, Ordering::Release);
        }
    }
}
