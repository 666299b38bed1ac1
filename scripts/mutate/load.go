package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/importer"
	"go/parser"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// module is the tree to mutate, as go list and the type checker see it.
type module struct {
	dir, path string
	fset      *token.FileSet
	importer  types.Importer
}

// unit is a package with its types.
type unit struct {
	folder, path string
	files        []*source
	info         *types.Info
}

// source is one file of a package.
type source struct {
	name  string // from the module's root
	text  []byte
	tree  *ast.File
	fixed bool // not to be mutated
}

// newModule builds everything that the folders import, for its types.
func newModule(dir string, folders []string) (*module, error) {
	path, err := output(dir, "go", "list", "-m")
	if err != nil {
		return nil, err
	}
	args := []string{"list", "-export", "-deps", "-json=ImportPath,Export"}
	for _, f := range folders {
		args = append(args, "./"+f)
	}
	type exported struct{ ImportPath, Export string }
	list, err := listed[exported](dir, args...)
	if err != nil {
		return nil, err
	}
	export := map[string]string{}
	for _, p := range list {
		export[p.ImportPath] = p.Export
	}
	fset := token.NewFileSet()
	return &module{dir, strings.TrimSpace(string(path)), fset, importer.ForCompiler(fset, "gc", func(path string) (io.ReadCloser, error) {
		if export[path] == "" {
			return nil, fmt.Errorf("nothing is known of %s", path)
		}
		return os.Open(export[path])
	})}, nil
}

// output runs a program in dir and returns what it prints.
func output(dir, name string, args ...string) ([]byte, error) {
	cmd := exec.Command(name, args...)
	var said bytes.Buffer
	cmd.Dir, cmd.Stderr = dir, &said
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, said.Bytes())
	}
	return out, nil
}

// listed runs go list with -json and returns the packages.
func listed[P any](dir string, args ...string) (list []P, err error) {
	out, err := output(dir, "go", args...)
	for d := json.NewDecoder(bytes.NewReader(out)); err == nil && d.More(); {
		var p P
		err = d.Decode(&p)
		list = append(list, p)
	}
	return list, err
}

// load parses and checks the package in a folder. If only names files, the others are fixed.
func (m *module) load(folder string, only []string) (*unit, error) {
	out, err := output(m.dir, "go", "list", "-f", `{{range .GoFiles}}{{.}}{{"\n"}}{{end}}`, "./"+folder)
	if err != nil {
		return nil, err
	}
	u := &unit{folder: folder, path: m.path + "/" + folder}
	for _, name := range strings.Fields(string(out)) {
		s := &source{name: filepath.Join(folder, name)}
		s.fixed = len(only) > 0 && !slices.Contains(only, name)
		if s.text, err = os.ReadFile(filepath.Join(m.dir, s.name)); err != nil {
			return nil, err
		}
		if s.tree, err = m.parse(s.name, s.text); err != nil {
			return nil, err
		}
		u.files = append(u.files, s)
	}
	u.info = &types.Info{Types: map[ast.Expr]types.TypeAndValue{}, Uses: map[*ast.Ident]types.Object{}, Selections: map[*ast.SelectorExpr]*types.Selection{}}
	return u, m.check(u, nil, nil, u.info)
}

func (m *module) parse(name string, text []byte) (*ast.File, error) {
	return parser.ParseFile(m.fset, name, text, parser.ParseComments|parser.SkipObjectResolution)
}

// compiles reports whether the package compiles with text in place of a file.
func (m *module) compiles(u *unit, s *source, text []byte) bool {
	tree, err := m.parse(s.name, text)
	return err == nil && m.check(u, s, tree, nil) == nil
}

// check type-checks a package with another tree in place of a file.
func (m *module) check(u *unit, in *source, with *ast.File, info *types.Info) error {
	var trees []*ast.File
	for _, s := range u.files {
		tree := s.tree
		if s == in {
			tree = with
		}
		trees = append(trees, tree)
	}
	cfg := types.Config{Importer: m.importer}
	_, err := cfg.Check(u.path, m.fset, trees, info)
	return err
}
