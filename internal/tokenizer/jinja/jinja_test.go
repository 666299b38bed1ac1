package jinja_test

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/xpyd/xpyd/internal/tokenizer/jinja"
)

var limits = jinja.Limits{Now: func() time.Time { return time.Date(2024, 7, 26, 9, 5, 3, 0, time.UTC) }}

// TestSnippets compares with Jinja2; see ../testdata/chat_goldens.py.
func TestSnippets(t *testing.T) {
	raw, err := os.ReadFile("testdata/snippets.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct{ Src, Out, Err, Msg string }
	if err := json.Unmarshal(raw, &cases); err != nil {
		t.Fatal(err)
	}
	for _, c := range cases {
		out, err := render(c.Src, nil, limits)
		switch {
		case c.Err != "" && err == nil:
			t.Errorf("%q\nhave %q\nwant error %s", c.Src, out, c.Msg)
		case c.Err == "" && err != nil:
			t.Errorf("%q\nhave error %v\nwant %q", c.Src, err, c.Out)
		case out != c.Out:
			t.Errorf("%q\nhave %q\nwant %q", c.Src, out, c.Out)
		}
	}
}

func render(src string, vars map[string]any, lim jinja.Limits) (string, error) {
	tmpl, err := jinja.Parse(src)
	if err != nil {
		return "", err
	}
	return tmpl.Render(context.Background(), vars, lim)
}

func TestVariables(t *testing.T) {
	f := func(src string, v any, want string) {
		t.Helper()
		got, err := render(src, map[string]any{"v": v}, limits)
		if err != nil || got != want {
			t.Errorf("%s of %v: have %q, %v, want %q", src, v, got, err, want)
		}
	}
	raw := func(text string) any { return json.RawMessage(text) }
	const nines = "99999999999999999999"
	f("{{ v | tojson }}", raw(`{"b":1,"a":[1.0,2e3,9223372036854775807,null]}`), `{"b": 1, "a": [1.0, 2000.0, 9223372036854775807, null]}`)
	f("{{ v | tojson }}", []json.RawMessage{[]byte(`{"b":1.0}`), []byte(`"x"`)}, `[{"b": 1.0}, "x"]`)
	f("{{ v.a.b }}", raw(`{"a":{"b":"c"}}`), "c")
	f("{{ v | length }}", raw("[{},{}]"), "2")
	f("{% generation %}{{ v }}{% endgeneration %}", int64(3), "3")
	f("{{ v }} {{ v is integer }} {{ v is number }} {{ v is float }} {{ v is true }} {{ v == "+nines+" }} {{ {v: 1}["+nines+"] }} {{ 1 if v }}",
		raw(nines), nines+" True True False False True 1 1")
	f("{{ v }}", raw("[-0, 1e999, -1e999]"), "[0, inf, -inf]")
	f("{{ v.a }} {{ v.h }} {{ v.i }} {{ v | length }} {{ 'x' in v }}", raw(`{"a":0,"b":1,"a":2,"c":3,"d":4,"e":5,"f":6,"g":7,"h":8,"i":9,"j":10}`), "2 8 9 10 False")
	if _, err := render("{{ v }}", map[string]any{"v": struct{}{}}, limits); err == nil {
		t.Error("a struct was taken")
	}
}

func TestRaised(t *testing.T) {
	_, err := render("a\n{{ raise_exception('no') }}", nil, limits)
	raised := func(err error) bool {
		var e *jinja.Error
		return errors.As(err, &e) && e.Raised
	}
	if !raised(err) || err.Error() != "no" {
		t.Errorf("have %v", err)
	}
	_, err = render("a\n\n{{ 1 / 0 }}", nil, limits)
	if raised(err) || err == nil || err.Error() != "template line 3: division by zero" {
		t.Errorf("have %v", err)
	}
}

// TestBounds renders templates that would take for ever, or all memory.
func TestBounds(t *testing.T) {
	lim := jinja.Limits{Steps: 100_000, Bytes: 1 << 20}
	for name, src := range map[string]string{
		"loops":         "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
		"range":         "{{ range(1000000000000) }}",
		"repeat":        "{{ 'a' * 1000000000000 }}",
		"doubling":      "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
		"list doubling": "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
		"replace":       "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
		"recursion":     "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
		"nested value":  "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
		"nested json":   "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
		"power":         "{{ 2 ** 2 ** 62 }} {{ 10 ** 30 }}",
		"width":         "{{ '%999999999d' % 1 }}",
		"indent":        "{{ 'a' | indent(1000000000, true) }}",
		"parentheses":   strings.Repeat("{{ (", 1) + strings.Repeat("(", 100_000),
		"ifs":           strings.Repeat("{% if 1 %}", 10_000),
		"sum":           "{{ 1" + strings.Repeat("+1", 10_000) + " }}",
		"nots":          "{{ " + strings.Repeat("not ", 10_000) + "1 }}",
		"min integer":   "{{ (-9223372036854775807 - 1) // -1 }}",
		"batch":         "{{ [1] | batch(1000000000, 0) | list }}",
		"join":          "{{ range(1000) | join('x' * 10000) }}",
		"json indent":   "{{ [[[1]]] | tojson(indent=1000000000) }}",
	} {
		if out, err := render(src, nil, lim); err == nil {
			t.Errorf("%s: rendered %d bytes", name, len(out))
		}
	}
}

// TestDepth renders templates whose nesting multiplies: a stack overflow could
// not be recovered from.
func TestDepth(t *testing.T) {
	deep := "m()"
	for range 44 {
		for _, op := range []string{"**1", "*1", "~1", "+1", " and 1", " or 1"} {
			deep += strings.Repeat(op, 990)
		}
		deep = "(" + deep + ")"
	}
	for name, src := range map[string]string{
		"operators": "{% macro m() %}{{ " + deep + " }}{% endmacro %}{{ m() }}",
		"filters": "{% set ns = namespace(x=[]) %}{% for i in range(10000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | map('map'" +
			strings.Repeat(",'map'", 10_000) + ") }}",
	} {
		if out, err := render(src, nil, limits); err == nil || !strings.Contains(err.Error(), "nested deeper") {
			t.Errorf("%s: have %q, %v", name, out, err)
		}
	}
	// What templates may do: a long sum in a macro that calls itself.
	out, err := render("{% macro f(n) %}{{ f(n-1) if n else 1"+strings.Repeat("+0", 900)+" }}{% endmacro %}{{ f(90) }}", nil, limits)
	if out != "1" || err != nil {
		t.Errorf("have %q, %v", out, err)
	}
}

// TestCharges renders templates that make or read more than they seem to.
func TestCharges(t *testing.T) {
	const big = "{% set x = 'a' * 1000000 %}{% set d = {} %}"
	lim := jinja.Limits{Steps: 400_000, Bytes: 16 << 20}
	for name, src := range map[string]string{
		"separators": "{{ range(1500) | list | tojson(separators=[x, ':']) }}",
		"colons":     "{% set d = {1:1,2:2,3:3,4:4,5:5,6:6,7:7,8:8,9:9,10:10,11:11,12:12,13:13,14:14,15:15,16:16,17:17} %}{{ d | tojson(separators=[',', x]) }}",
		"namespaces": "{% set d = dict() %}{% set ns = namespace(l=[], d={" + strings.Repeat("1:1,", 1000) + "}) %}" +
			"{% for i in range(5000) %}{% set ns.d = dict(ns.d, **{}) %}{% endfor %}",
		"keys":       "{% for i in range(100000) %}{% if x in d or d[x] or d.get(x) %}{% endif %}{% endfor %}",
		"length":     "{% for i in range(100000) %}{% if x | length == 1 %}{% endif %}{% endfor %}",
		"in":         "{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
		"equal":      "{% set y = 'a' * 1000000 %}{% for i in range(100000) %}{% if x == y and x >= y %}{% endif %}{% endfor %}",
		"dicts":      "{% set e = {x:1} %}{% set f = {x:1} %}{% for i in range(100000) %}{% if e == f %}{% endif %}{% endfor %}",
		"parameters": "{% macro f(" + strings.Repeat("a,", 10000) + "b) %}{% endmacro %}{% for i in range(10000) %}{{ f(1) }}{% endfor %}",
		"sum":        "{% set l = range(100000) | list %}{% for i in range(1000) %}{% if l | sum == 1 %}{% endif %}{% endfor %}",
		"strip":      "{% set y = 'b' * 1000000 %}{{ y.strip(x ~ 'b') }}",
		"upper":      "{% for i in range(100000) %}{% if x is upper %}{% endif %}{% endfor %}",
		"words":      "{% for i in range(100000) %}{% if x | wordcount > 1 %}{% endif %}{% endfor %}",
		"number":     "{% set n = '1' * 1000000 %}{% for i in range(100000) %}{% if n | int %}{% endif %}{% endfor %}",
		"quotes":     "{{ ['\x01' * 16000000] }}",
		"escapes":    "{{ '\x01' * 16000000 | tojson }}{{ ('\x01' * 16000000) | tojson }}",
		"date":       "{{ strftime_now('%B' * 2000000) }}",
		"name":       "{{ " + strings.Repeat("a", 100_000) + " }}",
	} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		out, err := render(big+src, nil, lim)
		runtime.ReadMemStats(&after)
		if made := (after.TotalAlloc - before.TotalAlloc) >> 20; err == nil || made > 128 {
			t.Errorf("%s: rendered %d bytes, %v, having made %d MiB", name, len(out), err, made)
		}
	}
	// An undefined value holds no copy of what was looked for.
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	out, err := render(big+"{% set l = ["+strings.Repeat("d[x],", 40)+"] %}{{ l | length }}{{ x[1:] | length }}{{ x.split('b') | length }}", nil, limits)
	runtime.ReadMemStats(&after)
	if made := (after.TotalAlloc - before.TotalAlloc) >> 20; out != "409999991" || err != nil || made > 8 {
		t.Errorf("have %q, %v, having made %d MiB", out, err, made)
	}
	if _, err := render(big+"{{ d[x].y }}", nil, limits); err == nil || len(err.Error()) > 2000 {
		t.Errorf("have an error of %d bytes", len(err.Error()))
	}
}

func TestContext(t *testing.T) {
	tmpl, err := jinja.Parse("{% for i in range(10000) %}{% endfor %}")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	if _, err := tmpl.Render(ctx, nil, limits); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := tmpl.Render(ctx, nil, limits); !errors.Is(err, context.Canceled) {
		t.Errorf("have %v", err)
	}
}

func FuzzRender(f *testing.F) {
	raw, err := os.ReadFile("testdata/snippets.json")
	if err != nil {
		f.Fatal(err)
	}
	var cases []struct{ Src string }
	if err := json.Unmarshal(raw, &cases); err != nil {
		f.Fatal(err)
	}
	for _, c := range cases {
		f.Add(c.Src)
	}
	vars := map[string]any{"messages": json.RawMessage(`[{"role":"user","content":"a"},{"role":"tool","content":[1,{"x":null}]}]`)}
	f.Fuzz(func(t *testing.T, src string) {
		out, err := render(src, vars, jinja.Limits{Steps: 20_000, Bytes: 1 << 20})
		if len(out) > 1<<20 {
			t.Errorf("%d bytes", len(out))
		}
		if err != nil && out != "" {
			t.Errorf("%q beside error %v", out, err)
		}
	})
}

// FuzzFromJSON compares with encoding/json.
func FuzzFromJSON(f *testing.F) {
	for _, s := range []string{`{} {}`, ` {"a" : [1, -2.5e3,true,false,null ,"x\u00e9\ud83d\ude00\ud83d\n\/"], "b":{}, "a":[]}`, `[1,]`, `{"a"}`, `{1:2}`, `"a`, "\"\n\"", `"\x"`, `"\u12"`,
		`01`, `[nul]`, `1 2`, "\"a\xff\"", ``, `-`, `[[[]]]`, `99999999999999999999`, `{"a":1,"b":2,"c":3,"d":4,"e":5,"f":6,"g":7,"h":8,"i":9,"a":0}`, `"\u+123"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		_, err := jinja.FromJSON(raw)
		if err != nil {
			if json.Valid(raw) && !strings.Contains(err.Error(), "nested deeper") {
				t.Errorf("refused %q: %v", raw, err)
			}
			return
		}
		if !json.Valid(raw) {
			t.Fatalf("took %q", raw)
		}
		var want, have any
		if !utf8.Valid(raw) || json.Unmarshal(raw, &want) != nil { // a number out of range
			return
		}
		out, err := render("{{ v | tojson }}", map[string]any{"v": json.RawMessage(raw)}, limits)
		if err != nil || json.Unmarshal([]byte(out), &have) != nil || !reflect.DeepEqual(have, want) {
			t.Errorf("%q became %q, %v", raw, out, err)
		}
	})
}
