//! Messages in shared memory. A slot is the same memory for both ranks, so it is poisoned where it is written.

use std::rc::Rc;

use pp_contract::tensor_digest;
use pp_runtime::stage::{Progress, StageResult};
use pp_transport::host::{RxLease, TxLease};

use super::book::{Book, Passage, Wrong};
use super::work::{POISON, Words};

pub(super) struct OnHost {
    book: Rc<Book>,
}

impl OnHost {
    pub(super) fn new(book: &Rc<Book>) -> Self {
        let book = Rc::clone(book);
        Self { book }
    }
}

impl Words for OnHost {
    type Tx = TxLease;
    type Rx = RxLease;
    type Read = std::convert::Infallible;

    fn write(&mut self, passage: Passage, slot: &mut TxLease) -> StageResult<()> {
        let words = &mut slot.bytes_mut()[..passage.bytes];
        words.fill(POISON);
        words.copy_from_slice(self.book.passage(passage));
        Ok(())
    }

    fn echo(
        &mut self,
        passage: Passage,
        input: &RxLease,
        digest_at: usize,
        output: &mut TxLease,
    ) -> StageResult<()> {
        let (input, output) = (&input.bytes()[..passage.bytes], output.bytes_mut());
        let digest = output[digest_at..].first_chunk_mut().expect("room for it");
        *digest = tensor_digest(input).to_le_bytes();
        let words = &mut output[..passage.bytes];
        words.fill(POISON);
        words.copy_from_slice(input);
        Ok(())
    }

    fn check(
        &mut self,
        passage: Passage,
        input: &RxLease,
        digest_at: usize,
    ) -> StageResult<Progress<Wrong, Self::Read>> {
        let (words, rest) = input.bytes().split_at(digest_at);
        let there = rest.first_chunk().expect("the digest of rank 1");
        let words = &words[..passage.bytes];
        let digests = [tensor_digest(words), u64::from_le_bytes(*there)];
        let right = tensor_digest(self.book.passage(passage));
        Ok(Progress::Done(
            self.book.compare(passage, words, digests, right),
        ))
    }
}
