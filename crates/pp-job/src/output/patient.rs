//! Reading and writing that waits where the other program made a pipe or a socket non-blocking.
//!
//! The flag belongs to the pipe's open end and not to this process: another process that shares that end may set it at
//! any time.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// A descriptor whose reads and writes wait until something can be done.
#[derive(Debug)]
pub struct Patient<F>(pub F);

impl<F: AsFd> Patient<F> {
    fn until_done<R>(
        &mut self,
        ready: PollFlags,
        mut act: impl FnMut(&mut F) -> io::Result<R>,
    ) -> io::Result<R> {
        loop {
            match act(&mut self.0) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    match poll(&mut [PollFd::new(&self.0, ready)], None) {
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                done => return done,
            }
        }
    }
}

impl<F: AsFd + Read> Read for Patient<F> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.until_done(PollFlags::IN, |file| file.read(into))
    }
}

impl<F: AsFd + Write> Write for Patient<F> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.until_done(PollFlags::OUT, |file| file.write(from))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::thread;

    use rustix::pipe::{PipeFlags, pipe_with};

    use super::*;

    #[test]
    fn a_pipe_that_is_full_or_empty_is_waited_for() {
        let (from, into) = pipe_with(PipeFlags::NONBLOCK).unwrap();
        let (mut from, mut into) = (File::from(from), Patient(File::from(into)));
        // Full: what follows has to wait until the other end reads.
        while into.0.write(&[7; 4096]).is_ok() {}
        let writing = thread::spawn(move || into.write_all(&[9; 300_000]).unwrap());
        let mut bytes = Vec::new();
        assert!(from.read(&mut [0; 1]).is_ok());
        Patient(from).read_to_end(&mut bytes).unwrap();
        writing.join().unwrap();
        assert!(bytes.len() > 300_000);
        assert!(bytes.ends_with(&[9; 300_000]));
    }
}
