//! Circles between the modules of a crate, for `cargo xtask layers`.
//!
//! The nodes are files. File A uses file B when code in A names an item that B defines: in a `use`, in a path, or in the
//! tokens of a macro. Re-exports are followed to the definition, so a `pub use` of a descendant is no use of it, and a
//! module that a path only passes through is not used. Two files that use each other are a circle, parent and child too.
//! Code that is compiled only for tests or for loom does not count, nor do comments and methods that are called on a
//! value.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, Meta, Token, UseTree, Visibility};

use crate::process::root;

/// Imports of imports are followed so far; `use name::name` of a foreign crate never ends.
const DEEPEST: usize = 8;

/// The shortest circle of each crate, in words, and the number of crates.
pub(crate) fn find() -> Result<(Vec<String>, usize)> {
    let mut crates = vec!["xtask".to_owned()];
    for entry in fs::read_dir(root().join("crates"))? {
        crates.push(format!("crates/{}", entry?.file_name().to_string_lossy()));
    }
    crates.sort();
    let read = |file: &str| fs::read_to_string(root().join(file)).ok();
    let mut found = Vec::new();
    for name in &crates {
        let mut uses = Uses::new();
        let mut targets = vec![format!("{name}/src/lib.rs"), format!("{name}/src/main.rs")];
        for entry in fs::read_dir(root().join(name).join("src/bin"))
            .into_iter()
            .flatten()
        {
            targets.push(format!(
                "{name}/src/bin/{}",
                entry?.file_name().to_string_lossy()
            ));
        }
        targets.retain(|file| root().join(file).is_file());
        ensure!(!targets.is_empty(), "{name} has no target");
        for target in &targets {
            uses.extend(Tree::read(target, &read)?.uses());
        }
        found.extend(shortest_circle(&uses).map(|circle| in_words(&uses, &circle)));
    }
    Ok((found, crates.len()))
}

/// What each file uses of which other: the first place.
type Uses = BTreeMap<String, BTreeMap<String, Named>>;

/// A name in code.
#[derive(Clone)]
struct Named {
    path: Vec<String>,
    line: usize,
}

struct Import {
    named: Named,
    /// None for a glob.
    alias: Option<String>,
    is_public: bool,
}

/// A module, or the root.
#[derive(Default)]
struct Module {
    file: String,
    /// Where files of child modules lie.
    folder: String,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    imports: Vec<Import>,
    paths: Vec<Named>,
}

#[derive(Clone, Copy)]
enum Meaning {
    Module(usize),
    /// In the module that defines it.
    Item(usize),
}

/// The modules of one target; the first is the root.
struct Tree<'a> {
    modules: Vec<Module>,
    read: &'a dyn Fn(&str) -> Option<String>,
}

impl<'a> Tree<'a> {
    fn read(target: &str, read: &'a dyn Fn(&str) -> Option<String>) -> Result<Self> {
        let mut tree = Self {
            modules: Vec::new(),
            read,
        };
        let folder = parent_of(target).to_owned();
        let text = read(target).with_context(|| format!("no {target}"))?;
        tree.read_file(target.to_owned(), folder, &text, None)?;
        Ok(tree)
    }

    fn read_file(
        &mut self,
        file: String,
        folder: String,
        text: &str,
        parent: Option<usize>,
    ) -> Result<usize> {
        let parsed = text
            .parse()
            .map_err(|error| anyhow!("{error}"))
            .and_then(|tokens| Ok(syn::parse2::<syn::File>(without_tests(tokens))?))
            .with_context(|| format!("cannot parse {file}"))?;
        let module = self.add(Module {
            file,
            folder,
            parent,
            ..Module::default()
        });
        let mut reader = Reader {
            tree: self,
            module,
            result: Ok(()),
        };
        reader.visit_file(&parsed);
        reader.result.map(|()| module)
    }

    fn add(&mut self, module: Module) -> usize {
        self.modules.push(module);
        self.modules.len() - 1
    }

    /// Reads the module that `mod name;` or `mod name { }` declares.
    fn declare(&mut self, parent: usize, item: &syn::ItemMod) -> Result<()> {
        let name = item.ident.to_string();
        let folder = format!("{}/{name}", self.modules[parent].folder);
        let child = if let Some((_, items)) = &item.content {
            let child = self.add(Module {
                file: self.modules[parent].file.clone(),
                folder,
                parent: Some(parent),
                ..Module::default()
            });
            let mut reader = Reader {
                tree: self,
                module: child,
                result: Ok(()),
            };
            for item in items {
                reader.visit_item(item);
            }
            reader.result?;
            child
        } else {
            let elsewhere = path_of(&item.attrs, parent_of(&self.modules[parent].file));
            let files = [format!("{folder}.rs"), format!("{folder}/mod.rs")];
            let found = (elsewhere.into_iter().chain(files))
                .find_map(|file| (self.read)(&file).map(|text| (file, text)));
            let (file, text) = found.with_context(|| format!("no file of module {folder}"))?;
            self.read_file(file, folder, &text, Some(parent))?
        };
        self.modules[parent].children.insert(name, child);
        Ok(())
    }

    /// What `path` means in `module`; None for what another crate defines.
    fn resolve(&self, module: usize, path: &[String], depth: usize) -> Option<Meaning> {
        let mut at = Meaning::Module(module);
        let mut is_ours = false;
        for (position, name) in path.iter().enumerate() {
            let Meaning::Module(module) = at else {
                return Some(at); // A variant or an associated item.
            };
            at = match name.as_str() {
                "crate" => Meaning::Module(0),
                "self" => at,
                "super" => Meaning::Module(self.modules[module].parent?),
                name => {
                    let is_last = position + 1 == path.len();
                    match self.look_up(module, name, is_last, depth) {
                        Some(meaning) => meaning,
                        None if is_ours => Meaning::Item(module), // Made by a macro, or of another crate.
                        None => return None,
                    }
                }
            };
            is_ours = true;
        }
        Some(at)
    }

    fn look_up(&self, module: usize, name: &str, is_last: bool, depth: usize) -> Option<Meaning> {
        let depth = depth.checked_sub(1)?;
        let scope = &self.modules[module];
        let child = scope
            .children
            .get(name)
            .map(|&child| Meaning::Module(child));
        if !is_last && child.is_some() {
            return child;
        }
        if scope.items.contains(name) {
            return Some(Meaning::Item(module));
        }
        let named = |import: &&Import| import.alias.as_deref() == Some(name);
        let resolve = |import: &Import| self.resolve(module, &import.named.path, depth);
        let in_glob = |import: &Import| match resolve(import)? {
            Meaning::Module(other) => self.look_up(other, name, is_last, depth),
            Meaning::Item(_) => None,
        };
        let imports = || scope.imports.iter();
        let mut globs = imports().filter(|import| import.alias.is_none());
        (imports().filter(named).find_map(resolve))
            .or(child)
            .or_else(|| globs.find_map(in_glob))
    }

    fn uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (module, scope) in self.modules.iter().enumerate() {
            let mut add = |named: &Named, is_re_export: bool, is_glob: bool| {
                let other = match self.resolve(module, &named.path, DEEPEST) {
                    Some(Meaning::Item(other)) => other,
                    Some(Meaning::Module(other)) if is_glob => other,
                    _ => return,
                };
                let file = &self.modules[other].file;
                if *file == scope.file || is_re_export && self.is_below(other, module) {
                    return;
                }
                let first = uses.entry(scope.file.clone()).or_default();
                let first = first.entry(file.clone()).or_insert_with(|| named.clone());
                if named.line < first.line {
                    *first = named.clone();
                }
            };
            for import in &scope.imports {
                add(&import.named, import.is_public, import.alias.is_none());
            }
            for named in &scope.paths {
                add(named, false, false);
            }
        }
        uses
    }

    fn is_below(&self, mut module: usize, ancestor: usize) -> bool {
        while let Some(parent) = self.modules[module].parent {
            if parent == ancestor {
                return true;
            }
            module = parent;
        }
        false
    }
}

/// Collects what one module defines, declares, imports and names.
struct Reader<'t, 'a> {
    tree: &'t mut Tree<'a>,
    module: usize,
    result: Result<()>,
}

impl Reader<'_, '_> {
    fn module(&mut self) -> &mut Module {
        &mut self.tree.modules[self.module]
    }

    fn import(&mut self, tree: &UseTree, path: &[String], is_public: bool) {
        let joined = |name: &syn::Ident| [path, &[name.to_string()]].concat();
        let (path, name, alias) = match tree {
            UseTree::Path(tree) => {
                return self.import(&tree.tree, &joined(&tree.ident), is_public);
            }
            UseTree::Group(tree) => {
                return (tree.items.iter()).for_each(|tree| self.import(tree, path, is_public));
            }
            UseTree::Name(tree) if tree.ident == "self" => {
                (path.to_vec(), &tree.ident, path.last().cloned())
            }
            UseTree::Name(tree) => (
                joined(&tree.ident),
                &tree.ident,
                Some(tree.ident.to_string()),
            ),
            UseTree::Rename(tree) => (
                joined(&tree.ident),
                &tree.ident,
                Some(tree.rename.to_string()),
            ),
            UseTree::Glob(tree) => {
                let line = tree.star_token.span.start().line;
                let named = Named {
                    path: path.to_vec(),
                    line,
                };
                return self.module().imports.push(Import {
                    named,
                    alias: None,
                    is_public,
                });
            }
        };
        let line = name.span().start().line;
        let named = Named { path, line };
        self.module().imports.push(Import {
            named,
            alias,
            is_public,
        });
    }

    /// Collects the paths in the tokens of a macro, `prefix` before each.
    fn scan(&mut self, tokens: TokenStream, prefix: &[String]) {
        let mut tokens = tokens.into_iter().peekable();
        let mut path = prefix.to_vec();
        let mut is_field = false;
        while let Some(token) = tokens.next() {
            match token {
                TokenTree::Ident(name) => {
                    path.push(name.to_string());
                    let colons = |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ':' && p.spacing() == proc_macro2::Spacing::Joint);
                    if tokens.next_if(colons).is_some() {
                        tokens.next();
                        match tokens.peek() {
                            Some(TokenTree::Ident(_)) => continue,
                            Some(TokenTree::Group(group)) => {
                                let inner = group.stream();
                                self.scan(inner, &path);
                            }
                            _ => {}
                        }
                    }
                    let named = Named {
                        path: std::mem::replace(&mut path, prefix.to_vec()),
                        line: name.span().start().line,
                    };
                    if !is_field {
                        self.module().paths.push(named);
                    }
                    is_field = false;
                }
                TokenTree::Group(group) => self.scan(group.stream(), &[]),
                TokenTree::Punct(punct) => is_field = punct.as_char() == '.',
                TokenTree::Literal(_) => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Reader<'_, '_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            self.module().items.insert(name.to_string());
        }
        visit::visit_item(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if self.result.is_ok() {
            self.result = self.tree.declare(self.module, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        if item.leading_colon.is_none() {
            self.import(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let line = path.segments[0].ident.span().start().line;
            let path = path
                .segments
                .iter()
                .map(|segment| segment.ident.to_string())
                .collect();
            self.module().paths.push(Named { path, line });
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'ast syn::Macro) {
        self.scan(item.tokens.clone(), &[]);
        visit::visit_macro(self, item);
    }

    fn visit_meta_list(&mut self, list: &'ast syn::MetaList) {
        self.scan(list.tokens.clone(), &[]);
        visit::visit_meta_list(self, list);
    }
}

fn parent_of(file: &str) -> &str {
    let parent = Path::new(file).parent().and_then(Path::to_str);
    parent.unwrap_or_default()
}

/// Where `#[path]` says that the file of a module lies, seen from `folder`.
fn path_of(attributes: &[syn::Attribute], folder: &str) -> Option<String> {
    let path = attributes
        .iter()
        .find_map(|attribute| match &attribute.meta {
            Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
                syn::Expr::Lit(syn::ExprLit {
                    lit: syn::Lit::Str(path),
                    ..
                }) => Some(path.value()),
                _ => None,
            },
            _ => None,
        })?;
    let mut parts: Vec<&str> = folder.split('/').collect();
    for part in path.split('/') {
        if part == ".." {
            parts.pop();
        } else {
            parts.push(part);
        }
    }
    Some(parts.join("/"))
}

/// The tokens without the items, statements and fields that no ordinary build compiles.
fn without_tests(tokens: TokenStream) -> TokenStream {
    let is = |token: Option<&TokenTree>, sign| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == sign);
    let mut kept = Vec::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        if is(Some(&token), '#')
            && matches!(tokens.peek(), Some(TokenTree::Group(group)) if is_left_out(group.stream()))
        {
            // The attributes before it, doc comments among them.
            while let [.., sign, TokenTree::Group(_)] = &kept[..]
                && is(Some(sign), '#')
            {
                kept.truncate(kept.len() - 2);
            }
            // The rest of what the attribute stands before: up to its braces, or a `;` or `,` behind it.
            let (mut angles, mut is_arrow) = (0, false);
            let is_end = |token: &TokenTree| match token {
                TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
                TokenTree::Punct(punct) => {
                    match punct.as_char() {
                        '<' => angles += 1,
                        '>' if !is_arrow => angles -= 1,
                        _ => {}
                    }
                    is_arrow = ['-', '='].contains(&punct.as_char());
                    punct.as_char() == ';' || punct.as_char() == ',' && angles == 0
                }
                _ => false,
            };
            if tokens.find(is_end).is_some() {
                tokens.next_if(|token| is(Some(token), ';'));
            }
            continue;
        }
        kept.push(match token {
            TokenTree::Group(group) => {
                let mut inner =
                    proc_macro2::Group::new(group.delimiter(), without_tests(group.stream()));
                inner.set_span(group.span());
                inner.into()
            }
            token => token,
        });
    }
    kept.into_iter().collect()
}

/// Whether these tokens are a `cfg` that holds for tests or loom only.
fn is_left_out(attribute: TokenStream) -> bool {
    match syn::parse2::<Meta>(attribute) {
        Ok(Meta::List(list)) if list.path.is_ident("cfg") => list
            .parse_args::<Meta>()
            .is_ok_and(|condition| is_for_tests(&condition)),
        _ => false,
    }
}

fn is_for_tests(condition: &Meta) -> bool {
    let Meta::List(list) = condition else {
        return condition.path().is_ident("test") || condition.path().is_ident("loom");
    };
    let parser = syn::punctuated::Punctuated::<Meta, Token![,]>::parse_terminated;
    let Ok(parts) = list.parse_args_with(parser) else {
        return false;
    };
    let mut parts = parts.iter();
    if list.path.is_ident("all") {
        parts.any(is_for_tests)
    } else {
        list.path.is_ident("any") && parts.all(is_for_tests)
    }
}

/// The files of the shortest circle, each of which uses the next, and the last the first.
fn shortest_circle(uses: &Uses) -> Option<Vec<&str>> {
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

fn in_words(uses: &Uses, circle: &[&str]) -> String {
    let mut words = format!("a circle of {} files:", circle.len());
    for (file, next) in circle.iter().zip(circle.iter().cycle().skip(1)) {
        let Named { path, line } = &uses[*file][*next];
        let _ = write!(
            words,
            "\n  {file}:{line} uses {} of {next}",
            path.join("::")
        );
    }
    words
}

#[cfg(test)]
mod tests;
