//! What is wrong with the uses between files: circles, and modules side by side that use each other.

use std::collections::{BTreeMap, VecDeque};

/// What each file uses of which other: the first place.
pub(super) type Uses = BTreeMap<String, BTreeMap<String, Named>>;

/// A name in code.
#[derive(Clone)]
pub(super) struct Named {
    pub(super) path: Vec<String>,
    pub(super) line: usize,
}

/// The files of the shortest circle, each of which uses the next, and the last the first.
pub(super) fn shortest_circle(uses: &Uses) -> Option<Vec<&str>> {
    let circles = uses.keys().filter_map(|start| {
        let mut from = BTreeMap::new();
        let mut queue = VecDeque::from([start]);
        while let Some(file) = queue.pop_front() {
            for next in uses.get(file).into_iter().flat_map(BTreeMap::keys) {
                if next == start {
                    let back = std::iter::successors(Some(file), |file| from.get(file).copied());
                    let mut circle: Vec<&str> = back.map(String::as_str).collect();
                    circle.reverse();
                    return Some(circle);
                }
                if !from.contains_key(next) {
                    from.insert(next, file);
                    queue.push_back(next);
                }
            }
        }
        None
    });
    circles.min_by_key(Vec::len)
}

pub(super) fn in_words(uses: &Uses, circle: &[&str]) -> String {
    let steps = circle.iter().zip(circle.iter().cycle().skip(1));
    let steps = steps.map(|(file, next)| use_in_words(file, next, &uses[*file][*next]));
    let steps: String = steps.collect();
    format!("a circle of {} files:{steps}", circle.len())
}

fn use_in_words(file: &str, other: &str, Named { path, line }: &Named) -> String {
    format!("\n  {file}:{line} uses {} of {other}", path.join("::"))
}

/// The modules that stand side by side and use each other, with what is below each, in words.
pub(super) fn pairs(uses: &Uses) -> Vec<String> {
    let path_of = |file: &str| -> Vec<String> {
        let file = file.trim_end_matches(".rs");
        let ends = ["/mod", "/lib", "/main"];
        let module = ends.iter().find_map(|end| file.strip_suffix(end));
        let names = module.unwrap_or(file).split('/');
        names.map(str::to_owned).collect()
    };
    let mut first = BTreeMap::new();
    for (file, others) in uses {
        for (other, named) in others {
            let (from, to) = (path_of(file), path_of(other));
            let at = from.iter().zip(&to).take_while(|(a, b)| a == b).count();
            if at < from.len().min(to.len()) {
                let modules = [from, to].map(|path| path[..=at].join("/"));
                let words = || use_in_words(file, other, named);
                first.entry(modules).or_insert_with(words);
            }
        }
    }
    let pair = |([from, to], there): (&[String; 2], &String)| {
        let back = first.get(&[to.clone(), from.clone()])?;
        (from < to).then(|| format!("{from} and {to} use each other:{there}{back}"))
    };
    first.iter().filter_map(pair).collect()
}
