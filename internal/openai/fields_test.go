package openai_test

import (
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/openai"
)

// TestFieldsHaveRows: what the parser and the router's scanner have a case for is what the table has rows
// for, endpoint by endpoint.
func TestFieldsHaveRows(t *testing.T) {
	cases := casesOf(t)
	of := map[openai.Endpoint][]string{
		openai.OnCompletions: {"completionField", "sampling", "constraint"},
		openai.OnChat:        {"chatField", "sampling", "constraint"},
		openai.OnDetokenize:  {"ParseDetokenize"},
		openai.OnEmbeddings:  {"ParseEmbeddings"},
		openai.OnCohereEmbed: {"ParseCohereEmbed"},
	}
	table := map[openai.Endpoint]map[string]openai.RequestField{}
	for _, f := range openai.RequestFields() {
		for _, e := range openai.Endpoints {
			if f.On&e.Of == 0 {
				continue
			}
			if table[e.Of] == nil {
				table[e.Of] = map[string]openai.RequestField{}
			}
			if _, twice := table[e.Of][f.Name]; twice {
				t.Errorf("%s has two rows for %s", f.Name, e.Path)
			}
			table[e.Of][f.Name] = f
		}
	}
	for e, funcs := range of {
		var names []string
		for _, name := range funcs {
			if len(cases[name]) == 0 {
				t.Fatalf("%s has no cases", name)
			}
			names = append(names, cases[name]...)
		}
		for _, name := range names {
			if f, ok := table[e][name]; !ok || f.Fate == openai.Routed {
				t.Errorf("%s is read (%v) and has no row", name, funcs)
			}
		}
		for name, f := range table[e] {
			if f.Fate != openai.Routed && !slices.Contains(names, name) {
				t.Errorf("%s has a row and is not read (%v)", name, funcs)
			}
		}
	}
	for _, name := range cases["ParseTokenize"] {
		if _, ok := table[openai.OnTokenize][name]; !ok {
			t.Errorf("%s of /tokenize has no row", name)
		}
	}
	for name := range table[openai.OnTokenize] {
		if all := slices.Concat(cases["ParseTokenize"], cases["chatField"], cases["sampling"], cases["constraint"]); !slices.Contains(all, name) {
			t.Errorf("%s has a row for /tokenize and is not read", name)
		}
	}
	for _, name := range cases["field"] { // the router's
		_, completion := table[openai.OnCompletions][name]
		_, chat := table[openai.OnChat][name]
		if !completion && !chat && name != "input" { // of other endpoints
			t.Errorf("%s is read by the router and has no row", name)
		}
	}
}

// casesOf returns the strings of the cases of this package's functions, by function, where they switch
// on a key.
func casesOf(t *testing.T) map[string][]string {
	t.Helper()
	pkgs, err := parser.ParseDir(token.NewFileSet(), ".", nil, 0) //nolint:staticcheck // no types are needed
	if err != nil {
		t.Fatal(err)
	}
	cases := map[string][]string{}
	for _, file := range pkgs["openai"].Files {
		for _, d := range file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				s, ok := n.(*ast.SwitchStmt)
				if !ok || s.Tag == nil || !ofKey(s.Tag) {
					return true
				}
				for _, c := range s.Body.List {
					for _, e := range c.(*ast.CaseClause).List {
						if lit, ok := e.(*ast.BasicLit); ok {
							name, _ := strconv.Unquote(lit.Value)
							cases[f.Name.Name] = append(cases[f.Name.Name], name)
						}
					}
				}
				return false // switches within are of members
			})
		}
	}
	return cases
}

// ofKey reports whether a switch's tag is string(key) or string(p.Decoded()).
func ofKey(tag ast.Expr) bool {
	call, ok := tag.(*ast.CallExpr)
	if !ok || len(call.Args) != 1 {
		return false
	}
	switch arg := call.Args[0].(type) {
	case *ast.Ident:
		return arg.Name == "key"
	case *ast.CallExpr:
		sel, ok := arg.Fun.(*ast.SelectorExpr)
		return ok && sel.Sel.Name == "Decoded"
	}
	return false
}

// schema is what the table's schemas consist of.
type schema struct {
	Type                                           any
	Minimum, Maximum, ExclusiveMinimum             *json.Number
	MinLength, MaxLength, MinItems, MaxItems       *int
	MaxProperties                                  *int
	Enum                                           []any
	Const                                          any
	Items                                          *schema
	AnyOf                                          []*schema
	Properties                                     map[string]*schema
	Required                                       []string
	PropertyNames, AdditionalProperties, Not, Else *schema
	Pattern                                        string
}

// values returns JSON on the good side of a schema's bounds, and on the bad side.
func (s *schema) values() (good, bad []string) {
	if s.AnyOf != nil {
		for _, one := range s.AnyOf {
			g, b := one.values()
			good = append(good, g...)
			for _, v := range b {
				if v[0] == '[' && one.Items != nil && one.MaxItems != nil && strings.Count(v, ",") == *one.MaxItems {
					bad = append(bad, v)
				}
			}
		}
		if slices.ContainsFunc(s.AnyOf, func(one *schema) bool { return one.Type == "boolean" }) {
			return good, append(bad, "7")
		}
		return good, append(bad, "true")
	}
	if s.Enum != nil {
		for _, v := range s.Enum {
			good = append(good, fmt.Sprintf("%q", v))
		}
		return good, []string{`"other"`, "7"}
	}
	switch s.Type {
	case "boolean":
		return []string{"true", "false"}, []string{"1", `"true"`, "[]"}
	case "integer", "number":
		bad = []string{`"1"`, "[1]", "true"}
		if s.Type == "integer" {
			bad = append(bad, "1.5")
		}
		add := func(n *json.Number, by int64, over string) {
			if n == nil {
				return
			}
			good = append(good, n.String())
			if v, err := n.Int64(); err == nil && v > -1<<62 && v < 1<<62 {
				bad = append(bad, strconv.FormatInt(v+by, 10))
			} else {
				bad = append(bad, over)
			}
		}
		add(s.Minimum, -1, "-9223372036854775809")
		add(s.Maximum, 1, "9223372036854775808")
		if s.ExclusiveMinimum != nil {
			bad = append(bad, s.ExclusiveMinimum.String())
		}
		return good, bad
	case "string":
		good, bad = []string{`"x"`}, []string{"7", "{}"}
		if s.MinLength != nil && *s.MinLength > 0 {
			bad = append(bad, `""`)
		}
		if s.MaxLength != nil {
			good = append(good, strconv.Quote(strings.Repeat("x", *s.MaxLength)))
			bad = append(bad, strconv.Quote(strings.Repeat("x", *s.MaxLength+1)))
		}
		return good, bad
	case "array":
		if s.Items == nil {
			return []string{"[]"}, []string{"[7]"}
		}
		item, wrong := s.Items.values()
		if len(item) == 0 {
			item = []string{"{}"}
		}
		good, bad = []string{"[" + item[0] + "]"}, []string{"7", `{"a":1}`}
		for _, w := range wrong {
			bad = append(bad, "["+w+"]")
		}
		if s.MinItems != nil {
			bad = append(bad, "[]")
		} else {
			good = append(good, "[]")
		}
		if s.MaxItems != nil && *s.MaxItems < 5000 {
			good = append(good, "["+times(*s.MaxItems, item[0])+"]")
			bad = append(bad, "["+times(*s.MaxItems+1, item[0])+"]")
		}
		return good, bad
	case "object":
		bad = []string{"7", `"x"`, "[1]"}
		if s.AdditionalProperties != nil {
			g, b := s.AdditionalProperties.values()
			return []string{`{"5":` + g[0] + `}`, "{}"}, append(bad, `{"5":`+b[0]+`}`, `{"a":`+g[0]+`}`)
		}
		one := map[string]json.RawMessage{}
		for name, p := range s.Properties {
			g, _ := p.values()
			if len(g) > 0 {
				one[name] = json.RawMessage(g[0])
			}
		}
		whole, _ := json.Marshal(one)
		for _, name := range s.Required {
			less := map[string]json.RawMessage{}
			for k, v := range one {
				if k != name {
					less[k] = v
				}
			}
			b, _ := json.Marshal(less)
			bad = append(bad, string(b))
		}
		return []string{string(whole)}, bad
	}
	if s.Const != nil {
		v, _ := json.Marshal(s.Const)
		return []string{string(v)}, []string{"7"}
	}
	return nil, nil
}

// TestFieldBounds: the parser takes and refuses values as the table's schemas have it.
func TestFieldBounds(t *testing.T) {
	// What else has to be there for a field to be good.
	with := map[string]string{
		"stream_options": `,"stream":true`, "top_logprobs": `,"logprobs":true`, "logprob_token_ids": `,"logprobs":LOGPROBS`,
		"max_tokens": `,"echo":true`, "continue_final_message": `,"add_generation_prompt":false`,
		"tool_choice": `,"tools":[{"type":"function","function":{"name":"x"}}]`, "min_tokens": `,"max_tokens":2147483647`,
	}
	for _, f := range openai.RequestFields() {
		if f.Fate == openai.Routed || f.Fate == openai.Linked {
			continue
		}
		var s schema
		if f.Schema != "" {
			d := json.NewDecoder(strings.NewReader(f.Schema))
			d.UseNumber()
			if err := d.Decode(&s); err != nil {
				t.Fatalf("%s: %v", f.Name, err)
			}
		}
		good, bad := s.values()
		if f.Fate == openai.Refused {
			bad = []string{`{"a":1}`}
		}
		for _, e := range openai.Endpoints {
			if f.On&e.Of == 0 {
				continue
			}
			base, logprobs, more := `"prompt":"x"`, "1", with[f.Name]
			if e.Of == openai.OnChat || e.Of == openai.OnTokenize && f.On&openai.OnChat != 0 {
				base, logprobs = `"messages":[{"role":"user","content":"x"}]`, "true"
			}
			if e.Of == openai.OnDetokenize {
				base = `"tokens":[]`
			}
			if e.Of == openai.OnEmbeddings {
				base = `"input":"x"`
			}
			if e.Of == openai.OnCohereEmbed {
				base, more = `"texts":["x"]`, ""
			}
			more = strings.Replace(more, "LOGPROBS", logprobs, 1)
			parse := func(value string) *openai.Error {
				body := []byte("{" + base + more + `,"` + f.Name + `":` + value + "}")
				if strings.HasPrefix(base, `"`+f.Name+`"`) {
					body = []byte(`{"` + f.Name + `":` + value + "}")
				}
				var err *openai.Error
				switch e.Of {
				case openai.OnCompletions:
					_, err = openai.ParseCompletion(body, 0)
				case openai.OnChat:
					_, err = openai.ParseChat(body, 0)
				case openai.OnTokenize:
					_, err = openai.ParseTokenize(body, 0)
				case openai.OnCohereEmbed:
					_, err = openai.ParseCohereEmbed(body)
				case openai.OnEmbeddings:
					_, err = openai.ParseEmbeddings(body, 0)
				default:
					_, err = openai.ParseDetokenize(body, 0)
				}
				return err
			}
			if len(good)+len(bad) == 0 {
				t.Errorf("%s has no bounds to try", f.Name)
			}
			for _, v := range good {
				if err := parse(v); err != nil {
					t.Errorf("%s: %s of %.60s: %v", e.Path, f.Name, v, err)
				}
			}
			for _, v := range bad {
				if err := parse(v); err == nil {
					t.Errorf("%s: %s of %.60s is taken", e.Path, f.Name, v)
				} else if root, _, _ := strings.Cut(err.Param, "["); root != f.Name && !strings.HasPrefix(root, f.Name+".") {
					t.Errorf("%s: %s of %.60s: the error names %q: %s", e.Path, f.Name, v, err.Param, err.Message)
				}
			}
			if f.Name != "messages" && f.Name != "prompt" && f.Name != "tokens" && f.Name != "input" && f.Name != "texts" {
				if err := parse("null"); err != nil {
					t.Errorf("%s: %s of null: %v", e.Path, f.Name, err)
				}
			}
		}
	}
}
