// Package jinja renders the Jinja2 templates that models carry for chats, as
// Hugging Face renders them: trim_blocks and lstrip_blocks on, no autoescape,
// loop controls, tojson without ASCII escapes, raise_exception, strftime_now.
//
// A template comes with a model, from a stranger: rendering is bounded in steps, in bytes
// allocated and in depth, values are immutable (except namespaces), and nothing outside the
// template and its variables can be reached. Integers beyond int64 are passed on and
// printed, not computed with.
//
// Not covered: inheritance, include, import, recursive loops, autoescape, calls with *args,
// and filters that no known chat template uses, such as groupby, truncate, center, random
// and urlencode. Of Unicode's case mappings from one character to several only that of ß is
// applied.
package jinja

import (
	"cmp"
	"context"
	"fmt"
	"strings"
	"time"
)

// Limits bounds one rendering. A zero field means the default.
type Limits struct {
	Steps int              // statements and expressions evaluated; default 4 million
	Bytes int              // bytes of all strings and lists made while rendering; default 256 MiB
	Now   func() time.Time // clock of strftime_now; default time.Now
}

const (
	defaultSteps = 4 << 20
	defaultBytes = 256 << 20
	maxSource    = 1 << 20
	maxNest      = 100  // depth of nesting in a template, of macro calls, of values
	maxChain     = 1000 // operators in a row
	maxDepth     = 4000 // expressions inside expressions, over all macro calls
	maxName      = 1000 // bytes of a name, and
	maxMessage   = 1000 // of a message that the template did not write
	checkSteps   = 4096 // between two looks at the context
)

// Error is a fault in a template, or its reason to refuse its input.
type Error struct {
	Line   int
	Msg    string
	Raised bool // the template itself called raise_exception(Msg)
}

func (e *Error) Error() string {
	if e.Raised {
		return e.Msg
	}
	return fmt.Sprintf("template line %d: %s", e.Line, e.Msg)
}

// Template is a parsed template. It is immutable and safe for concurrent use.
type Template struct{ body []stmt }

// Parse reads a template.
func Parse(source string) (t *Template, err error) {
	if len(source) > maxSource {
		return nil, fmt.Errorf("template of %d bytes is larger than %d", len(source), maxSource)
	}
	defer catch(&err)
	p := &parser{toks: lex(source)}
	body := p.body()
	if p.kind() != tokEOF {
		p.fail("unexpected %q", p.cur().val)
	}
	return &Template{body: body}, nil
}

// Render executes the template with vars, whose values FromGo converts, until
// ctx is done.
func (t *Template) Render(ctx context.Context, vars map[string]any, lim Limits) (out string, err error) {
	lim.Steps, lim.Bytes = cmp.Or(lim.Steps, defaultSteps), cmp.Or(lim.Bytes, defaultBytes)
	if lim.Now == nil {
		lim.Now = time.Now
	}
	defer catch(&err)
	in := &interp{steps: lim.Steps, bytes: lim.Bytes, now: lim.Now, out: &strings.Builder{}, globals: map[string]value{},
		ctx: ctx, check: max(0, lim.Steps-checkSteps)}
	for name, v := range vars {
		conv, err := FromGo(v)
		if err != nil {
			return "", fmt.Errorf("template variable %s: %w", name, err)
		}
		in.globals[name] = conv
	}
	in.exec(t.body, inner(nil))
	return in.out.String(), nil
}

// catch turns the panic of a fail method into an error; the evaluator is
// recursive and would otherwise be mostly error checks.
func catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case *Error:
		*err = r
	case stopped:
		*err = r.err
	default:
		panic(r)
	}
}

// stopped is the panic value of a rendering whose context is done.
type stopped struct{ err error }
