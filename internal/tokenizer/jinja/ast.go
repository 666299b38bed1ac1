package jinja

type stmt interface{}

type (
	textStmt struct{ text string }
	outStmt  struct {
		x    expr
		line int
	}
	ifStmt struct {
		arms []ifArm
		els  []stmt
	}
	ifArm struct {
		cond expr
		body []stmt
		line int
	}
	forStmt struct {
		target target
		iter   expr
		cond   expr // nil: every item
		body   []stmt
		els    []stmt
		line   int
	}
	setStmt struct {
		target  target
		x       expr   // nil: the body's output
		body    []stmt // of {% set x %}…{% endset %}
		filters []filterExpr
		line    int
	}
	macroStmt struct {
		name   string
		params []param
		body   []stmt
		extra  extra // what it takes beside its parameters
	}
	callStmt struct { // {% call(params) x(…) %}body{% endcall %}
		call   *callExpr
		caller *macroStmt
		line   int
	}
	filterStmt struct {
		filters []filterExpr
		body    []stmt
		line    int
	}
	withStmt struct {
		names  []string
		values []expr
		body   []stmt
		line   int
	}
	loopCtl struct{ brk bool }
)

// extra is which of the names varargs and kwargs a macro's body has.
type extra struct{ varargs, kwargs bool }

type param struct {
	name string
	def  expr // nil: none
}

// target is what a for or set assigns to: names, or one attribute of a
// namespace.
type target struct {
	names []string
	tuple bool
	attr  string
}

type expr interface{}

type (
	literal  struct{ v value }
	nameExpr struct{ name string }
	listExpr struct {
		items []expr
		tuple bool
	}
	dictExpr struct{ keys, vals []expr }
	unary    struct {
		op string
		x  expr
	}
	binary struct {
		op   string
		l, r expr
	}
	compare struct {
		first expr
		ops   []string
		rest  []expr
	}
	condExpr struct{ then, cond, els expr } // els may be nil
	attrExpr struct {
		x    expr
		name string
	}
	indexExpr struct{ x, at expr }
	sliceExpr struct{ x, from, to, step expr } // parts may be nil
	callExpr  struct {
		fn   expr
		args callArgs
	}
	filterExpr struct {
		x    expr // nil in filter and set blocks
		name string
		args callArgs
	}
	testExpr struct {
		x    expr
		name string
		args callArgs
		not  bool
	}
)

type callArgs struct {
	pos   []expr
	names []string
	named []expr
}
