package main

import (
	"go/ast"
	"go/constant"
	"go/token"
	"go/types"
	"slices"
	"strconv"
	"strings"
)

// kinds are the kinds of bugs, in drawing order.
var kinds = []string{"relax", "negate", "andor", "bound", "drop", "defer", "error", "ignore", "swap", "const", "return"}

// edit replaces source[from:to].
type edit struct {
	kind     string
	from, to int
	text     string
	fn       string // the function around it, if any
}

// finder collects the edits of one file, in the order of its text.
type finder struct {
	m     *module
	u     *unit
	s     *source
	edits []edit

	funcs    []*ast.FuncType   // around the current node
	returned map[ast.Expr]bool // returned true and false
}

func find(m *module, u *unit, s *source) []edit {
	f := &finder{m: m, u: u, s: s, returned: map[ast.Expr]bool{}}
	for _, d := range s.tree.Decls {
		if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.IMPORT {
			continue
		}
		before := len(f.edits)
		f.walk(d)
		if fn, ok := d.(*ast.FuncDecl); ok {
			for i := range f.edits[before:] {
				f.edits[before+i].fn = fn.Name.Name
			}
		}
	}
	return f.edits
}

func (f *finder) walk(root ast.Node) {
	ast.Inspect(root, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if n.Body != nil {
				f.body(n.Type, n.Body)
			}
			return false
		case *ast.FuncLit:
			f.body(n.Type, n.Body)
			return false
		case *ast.BinaryExpr:
			if f.duration(n) {
				f.replace("const", n, "0")
				return false
			}
			f.binary(n)
		case *ast.SliceExpr:
			f.step(n.Low)
			f.step(n.High)
		case *ast.IfStmt:
			f.branch(n)
		case *ast.ForStmt:
			f.not(n.Cond)
		case *ast.BasicLit:
			f.number(n)
		case *ast.Ident:
			if n.Name == "true" || n.Name == "false" {
				f.truth(n)
			}
		case *ast.CallExpr:
			if f.says(n) {
				return false
			}
			f.swap(n)
		case *ast.ReturnStmt:
			f.result(n)
		case *ast.DeferStmt:
			if !f.lock(n.Call) && !f.timer(n.Call) {
				f.replace("defer", n, "")
			}
			return !f.says(n.Call)
		case *ast.BlockStmt:
			f.statements(n.List)
		case *ast.CaseClause:
			f.statements(n.Body)
		case *ast.CommClause:
			f.statements(n.Body)
		}
		return true
	})
}

func (f *finder) body(t *ast.FuncType, b *ast.BlockStmt) {
	f.funcs = append(f.funcs, t)
	f.walk(b)
	f.funcs = f.funcs[:len(f.funcs)-1]
}

func (f *finder) at(p token.Pos) int { return f.m.fset.Position(p).Offset }

func (f *finder) text(n ast.Node) string { return string(f.s.text[f.at(n.Pos()):f.at(n.End())]) }

func (f *finder) replace(kind string, n ast.Node, text string) {
	f.span(kind, n.Pos(), n.End(), text)
}

func (f *finder) span(kind string, from, to token.Pos, text string) {
	f.edits = append(f.edits, edit{kind: kind, from: f.at(from), to: f.at(to), text: text})
}

var (
	relaxed = map[token.Token]string{token.LSS: "<=", token.LEQ: "<", token.GTR: ">=", token.GEQ: ">"}
	negated = map[token.Token]string{token.EQL: "!=", token.NEQ: "==", token.LSS: ">=", token.LEQ: ">", token.GTR: "<=", token.GEQ: "<"}
	andor   = map[token.Token]string{token.LAND: "||", token.LOR: "&&"}
)

// binary relaxes and negates comparisons, swaps && and ||, and moves bounds by one.
func (f *finder) binary(n *ast.BinaryExpr) {
	op := func(kind string, to map[token.Token]string) {
		if text := to[n.Op]; text != "" {
			f.span(kind, n.OpPos, n.OpPos+token.Pos(len(n.Op.String())), text)
		}
	}
	if !f.large(n.Y) && !f.large(n.X) {
		op("relax", relaxed)
	}
	if !f.isError(n.X) { // else "ignore" does it
		op("negate", negated)
	}
	op("andor", andor)
	if relaxed[n.Op] != "" {
		f.step(n.Y)
	}
}

// step moves a bound by one.
func (f *finder) step(e ast.Expr) {
	if e == nil || !f.basic(e, types.IsInteger) {
		return
	}
	if _, ok := e.(*ast.BasicLit); ok || f.large(e) {
		return // "const" does literals
	}
	for _, by := range []string{"+1", "-1"} {
		f.replace("bound", e, "("+f.text(e)+by+")")
	}
}

// branch negates a condition that is no comparison, and skips the handling of an error.
func (f *finder) branch(n *ast.IfStmt) {
	f.not(n.Cond)
	if c, ok := n.Cond.(*ast.BinaryExpr); ok && c.Op == token.NEQ && f.isError(c.X) {
		f.replace("ignore", n.Cond, f.text(n.Cond)+" && false")
	}
}

func (f *finder) not(cond ast.Expr) {
	switch cond.(type) {
	case nil, *ast.BinaryExpr, *ast.ParenExpr:
		return
	}
	f.replace("negate", cond, "!("+f.text(cond)+")")
}

// small bounds the numbers that are changed by one: 1025 for a limit of 1024 is no bug.
const small = 16

// large reports whether an expression is a number that is not small.
func (f *finder) large(e ast.Expr) bool {
	v := f.u.info.Types[e].Value
	if v == nil || v.Kind() != constant.Int {
		return false
	}
	n, ok := constant.Int64Val(v)
	return !ok || n > small
}

// number changes a small number by one and any other to 0.
func (f *finder) number(n *ast.BasicLit) {
	v, err := strconv.ParseInt(n.Value, 0, 63)
	switch {
	case n.Kind == token.FLOAT:
		f.replace("const", n, "0.0")
	case n.Kind != token.INT || err != nil:
	case v > small:
		f.replace("const", n, "0")
	default:
		f.replace("const", n, strconv.FormatInt(v+1, 10))
		if v > 0 {
			f.replace("const", n, strconv.FormatInt(v-1, 10))
		}
	}
}

// truth flips true and false; returned ones are a kind of their own.
func (f *finder) truth(n *ast.Ident) {
	if f.u.info.Uses[n] == types.Universe.Lookup(n.Name) {
		kind := "const"
		if f.returned[n] {
			kind = "return"
		}
		f.replace(kind, n, opposite[n.Name])
	}
}

var opposite = map[string]string{"true": "false", "false": "true"}

// duration reports whether an expression is like 3 * time.Second.
func (f *finder) duration(n *ast.BinaryExpr) bool {
	_, ok := n.X.(*ast.BasicLit)
	t := f.u.info.TypeOf(n)
	return ok && n.Op == token.MUL && t != nil && t.String() == "time.Duration"
}

// swap exchanges adjacent arguments of the same type.
func (f *finder) swap(n *ast.CallExpr) {
	if tv := f.u.info.Types[n.Fun]; tv.IsType() || tv.IsBuiltin() {
		return
	}
	for i := 1; i < len(n.Args); i++ {
		a, b := n.Args[i-1], n.Args[i]
		ta, tb := f.u.info.TypeOf(a), f.u.info.TypeOf(b)
		if ta == nil || tb == nil || !types.Identical(ta, tb) || f.text(a) == f.text(b) || n.Ellipsis.IsValid() && i == len(n.Args)-1 {
			continue
		}
		between := string(f.s.text[f.at(a.End()):f.at(b.Pos())])
		f.span("swap", a.Pos(), b.End(), f.text(b)+between+f.text(a))
	}
}

// result returns nil instead of an error, and the opposite of a bool.
func (f *finder) result(n *ast.ReturnStmt) {
	for _, e := range n.Results {
		text := f.text(e)
		b, _ := e.(*ast.BinaryExpr)
		switch {
		case text == "nil":
		case opposite[text] != "":
			f.returned[e] = true
		case b != nil && negated[b.Op] != "": // "negate" does it
		case len(n.Results) == f.results() && f.basic(e, types.IsBoolean):
			f.replace("return", e, "!("+text+")")
		case len(n.Results) == f.results() && f.isError(e):
			f.replace("error", e, "nil")
		}
	}
}

// results is the number of results of the enclosing function.
func (f *finder) results() int {
	if len(f.funcs) == 0 {
		return 0
	}
	return f.funcs[len(f.funcs)-1].Results.NumFields()
}

// statements drops calls for effect, assignments, sends and steps, but evaluates an assignment's
// right side.
func (f *finder) statements(list []ast.Stmt) {
	for _, s := range list {
		switch s := s.(type) {
		case *ast.ExprStmt:
			call, ok := s.X.(*ast.CallExpr)
			if ok && !f.says(call) && !f.lock(call) && !f.timer(call) && f.text(call.Fun) != "panic" {
				f.replace("drop", s, "")
			}
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
			text := ""
			if len(s.Rhs) == 1 && len(s.Lhs) == 1 && f.text(s.Lhs[0]) != "_" && f.text(s.Rhs[0]) != "nil" {
				text = "_ = " + f.text(s.Rhs[0])
			}
			f.replace("drop", s, text)
		case *ast.IncDecStmt, *ast.SendStmt:
			f.replace("drop", s, "")
		}
	}
}

// lock reports whether a call takes or releases a lock. Only the race detector sees those missing.
func (f *finder) lock(n *ast.CallExpr) bool {
	sel, ok := n.Fun.(*ast.SelectorExpr)
	return ok && slices.Contains([]string{"Lock", "Unlock", "RLock", "RUnlock"}, sel.Sel.Name)
}

// timer reports whether a call stops a timer. Without it the timer is collected all the same.
func (f *finder) timer(n *ast.CallExpr) bool {
	sel, ok := n.Fun.(*ast.SelectorExpr)
	if !ok || sel.Sel.Name != "Stop" {
		return false
	}
	t := f.u.info.TypeOf(sel.X)
	return t != nil && (t.String() == "*time.Timer" || t.String() == "*time.Ticker")
}

// says reports whether a call only writes a log line or a text, whose words no test checks.
func (f *finder) says(n *ast.CallExpr) bool {
	sel, ok := n.Fun.(*ast.SelectorExpr)
	if !ok {
		return false
	}
	if t := f.u.info.TypeOf(sel.X); t != nil && strings.TrimPrefix(t.String(), "*") == "log/slog.Logger" {
		return true
	}
	id, ok := sel.X.(*ast.Ident)
	if !ok {
		return false
	}
	p, ok := f.u.info.Uses[id].(*types.PkgName)
	return ok && slices.Contains([]string{"fmt", "errors", "log/slog"}, p.Imported().Path())
}

func (f *finder) isError(e ast.Expr) bool {
	t := f.u.info.TypeOf(e)
	return t != nil && types.AssignableTo(t, types.Universe.Lookup("error").Type()) && t != types.Typ[types.UntypedNil]
}

func (f *finder) basic(e ast.Expr, info types.BasicInfo) bool {
	t := f.u.info.TypeOf(e)
	if t == nil {
		return false
	}
	b, ok := t.Underlying().(*types.Basic)
	return ok && b.Info()&info != 0
}
