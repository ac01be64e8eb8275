//! Circles between the modules of a crate, for `cargo xtask layers`.
//!
//! The nodes are files. File A uses file B when code in A names an item that B defines: in a `use`, in a path, or in the
//! tokens of a macro. Re-exports are followed to the definition, so a `pub use` of a descendant is no use of it, and a
//! module that a path only passes through is not used. Two files that use each other are a circle, parent and child too.
//! So are two modules that stand side by side and use each other, each with all that is below it.
//! A method that is called on `self`, or on a field of it, is an item, too: file A uses the file of the `impl` that defines
//! it. Code that is compiled only for tests or for loom does not count, nor do comments and methods of other values.

mod found;
mod syntax;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Item, Meta, UseTree, Visibility};

use self::found::{Named, Uses, in_words, pairs, shortest_circle};
use self::syntax::{fields_of_self, names_of, path_of_type, without_tests};
use crate::process::{listed, root};

/// Imports of imports are followed so far; `use name::name` of a foreign crate never ends.
const DEEPEST: usize = 8;

/// The shortest circle of each crate, in words, and the number of crates.
pub(crate) fn find() -> Result<(Vec<String>, usize)> {
    let mut crates = listed("crates")?;
    crates.push("xtask".into());
    let read = |file: &str| fs::read_to_string(root().join(file)).ok();
    let mut found = Vec::new();
    for name in &crates {
        let mut uses = Uses::new();
        let mut targets = vec![name.join("src/lib.rs"), name.join("src/main.rs")];
        targets.extend(listed(name.join("src/bin")).unwrap_or_default());
        targets.retain(|file| root().join(file).is_file());
        ensure!(!targets.is_empty(), "{} has no target", name.display());
        for target in &targets {
            uses.extend(Tree::read(&target.to_string_lossy(), &read)?.uses());
        }
        found.extend(shortest_circle(&uses).map(|circle| in_words(&uses, &circle)));
        found.extend(pairs(&uses));
    }
    Ok((found, crates.len()))
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
    /// By item: the types of its fields; of a type alias, the type that it stands for, under no name.
    items: BTreeMap<String, BTreeMap<String, Vec<String>>>,
    imports: Vec<Import>,
    paths: Vec<Named>,
    /// Methods that the `impl`s here define, behind the path of their type.
    methods: Vec<Vec<String>>,
    /// Methods that are called on `self`: the path of its type, and the fields on the way to the method, which is last.
    calls: Vec<(Vec<String>, Named)>,
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
        self.read_items(file, folder, parent, &parsed.items)
    }

    fn read_items(
        &mut self,
        file: String,
        folder: String,
        parent: Option<usize>,
        items: &[Item],
    ) -> Result<usize> {
        let module = self.modules.len();
        self.modules.push(Module {
            file,
            folder,
            parent,
            ..Module::default()
        });
        let mut reader = Reader {
            tree: self,
            module,
            this: Vec::new(),
            result: Ok(()),
        };
        items.iter().for_each(|item| reader.visit_item(item));
        reader.result.map(|()| module)
    }

    /// Reads the module that `mod name;` or `mod name { }` declares.
    fn declare(&mut self, parent: usize, item: &syn::ItemMod) -> Result<()> {
        let name = item.ident.to_string();
        let folder = format!("{}/{name}", self.modules[parent].folder);
        let child = if let Some((_, items)) = &item.content {
            let file = self.modules[parent].file.clone();
            self.read_items(file, folder, Some(parent), items)?
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
        if scope.items.contains_key(name) {
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

    /// The module and the name of the type that `path` means in `module`.
    fn type_of(&self, module: usize, path: &[String], depth: usize) -> Option<(usize, String)> {
        let depth = depth.checked_sub(1)?;
        let Some(Meaning::Item(other)) = self.resolve(module, path, DEEPEST) else {
            return None;
        };
        let name = path.last()?;
        match self.modules[other].items.get(name)?.get("") {
            Some(alias) => self.type_of(other, alias, depth),
            None => Some((other, name.clone())),
        }
    }

    /// The files of the methods of each type.
    fn methods(&self) -> BTreeMap<((usize, String), &str), &str> {
        let mut methods = BTreeMap::new();
        for (module, scope) in self.modules.iter().enumerate() {
            for path in &scope.methods {
                let (method, path) = path.split_last().expect("a method has a name");
                if let Some(of) = self.type_of(module, path, DEEPEST) {
                    methods.insert((of, method.as_str()), scope.file.as_str());
                }
            }
        }
        methods
    }

    /// The type on which the last name of `call` is a method: the fields before it lead there.
    fn receiver(&self, module: usize, path: &[String], call: &[String]) -> Option<(usize, String)> {
        let (_, fields) = call.split_last()?;
        let this = self.type_of(module, path, DEEPEST);
        fields.iter().try_fold(this?, |(module, of), field| {
            let path = self.modules[module].items.get(&of)?.get(field)?;
            self.type_of(module, path, DEEPEST)
        })
    }

    fn uses(&self) -> Uses {
        let mut uses = Uses::new();
        let methods = self.methods();
        for (module, scope) in self.modules.iter().enumerate() {
            let called = scope.calls.iter().filter_map(|(path, call)| {
                let of = self.receiver(module, path, &call.path)?;
                Some((*methods.get(&(of, call.path.last()?))?, call))
            });
            let imported = scope.imports.iter().filter_map(|import| {
                let other = match self.resolve(module, &import.named.path, DEEPEST)? {
                    Meaning::Item(other) => other,
                    Meaning::Module(other) if import.alias.is_none() => other,
                    Meaning::Module(_) => return None,
                };
                let is_counted = !import.is_public || !self.is_below(other, module);
                is_counted.then(|| (&*self.modules[other].file, &import.named))
            });
            let named = scope.paths.iter().filter_map(|named| {
                match self.resolve(module, &named.path, DEEPEST)? {
                    Meaning::Item(other) => Some((&*self.modules[other].file, named)),
                    Meaning::Module(_) => None,
                }
            });
            for (file, named) in called.chain(imported).chain(named) {
                if file == scope.file {
                    continue;
                }
                let first = uses.entry(scope.file.clone()).or_default();
                let first = first
                    .entry(file.to_owned())
                    .or_insert_with(|| named.clone());
                if named.line < first.line {
                    *first = named.clone();
                }
            }
        }
        uses
    }

    fn is_below(&self, module: usize, ancestor: usize) -> bool {
        let parent_of = |module: &usize| self.modules[*module].parent;
        std::iter::successors(parent_of(&module), parent_of).any(|module| module == ancestor)
    }
}

/// Collects what one module defines, declares, imports and names.
struct Reader<'t, 'a> {
    tree: &'t mut Tree<'a>,
    module: usize,
    /// The path of the type whose `impl` is read.
    this: Vec<String>,
    result: Result<()>,
}

impl Reader<'_, '_> {
    fn module(&mut self) -> &mut Module {
        &mut self.tree.modules[self.module]
    }

    fn import(&mut self, tree: &UseTree, path: &[String], is_public: bool) {
        let joined = |name: &syn::Ident| [path, &[name.to_string()]].concat();
        let (path, span, alias) = match tree {
            UseTree::Path(tree) => {
                return self.import(&tree.tree, &joined(&tree.ident), is_public);
            }
            UseTree::Group(tree) => {
                return (tree.items.iter()).for_each(|tree| self.import(tree, path, is_public));
            }
            UseTree::Glob(tree) => (path.to_vec(), tree.star_token.span, None),
            UseTree::Name(tree) if tree.ident == "self" => {
                (path.to_vec(), tree.ident.span(), path.last().cloned())
            }
            UseTree::Name(tree) => {
                let path = joined(&tree.ident);
                let alias = path.last().cloned();
                (path, tree.ident.span(), alias)
            }
            UseTree::Rename(tree) => {
                let alias = Some(tree.rename.to_string());
                (joined(&tree.ident), tree.ident.span(), alias)
            }
        };
        let line = span.start().line;
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
        let mut fields = BTreeMap::new();
        let name = match item {
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Macro(item) => item.ident.as_ref(),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => {
                fields.extend(item.fields.iter().filter_map(|field| {
                    let name = field.ident.as_ref().map(ToString::to_string);
                    Some((name?, path_of_type(&field.ty)?))
                }));
                Some(&item.ident)
            }
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => {
                fields.extend(path_of_type(&item.ty).map(|path| (String::new(), path)));
                Some(&item.ident)
            }
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        if let Some(name) = name {
            // A type and a function may have one name.
            let of_item = self.module().items.entry(name.to_string()).or_default();
            of_item.extend(fields);
        }
        visit::visit_item(self, item);
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        self.this = path_of_type(&item.self_ty).unwrap_or_default();
        for part in &item.items {
            if let (syn::ImplItem::Fn(method), None) = (part, &item.trait_) {
                let path = [&self.this[..], &[method.sig.ident.to_string()]].concat();
                self.module().methods.push(path);
            }
        }
        visit::visit_item_impl(self, item);
        self.this.clear();
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        if let Some(fields) = fields_of_self(&call.receiver) {
            let line = call.method.span().start().line;
            let path = [fields, vec![call.method.to_string()]].concat();
            let this = self.this.clone();
            self.module().calls.push((this, Named { path, line }));
        }
        visit::visit_expr_method_call(self, call);
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
            let path = names_of(path);
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

#[cfg(test)]
mod tests;
