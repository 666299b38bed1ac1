package tokenizer_test

import (
	"encoding/json"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/tokenizer"
)

// strangers are templates that a client could send to keep a worker busy, or to take its memory.
var strangers = map[string]string{
	"loops":            "{% for a in range(1000) %}{% for b in range(1000) %}{% for c in range(1000) %}{% endfor %}{% endfor %}{% endfor %}",
	"a long loop":      "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
	"macros":           "{% macro a(n) %}{% if n %}{{ a(n-1) }}{{ a(n-1) }}{% endif %}{% endmacro %}{{ a(90) }}",
	"itself":           "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
	"doubled text":     "{% set ns = namespace(s='ab') %}{% for i in range(100) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
	"doubled list":     "{% set ns = namespace(s=[1]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
	"repeated":         "{{ 'a' * 1000000000000 }}",
	"replaced":         "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
	"the conversation": "{% for i in range(100000) %}{% for j in range(100000) %}{{ messages | tojson }}{% endfor %}{% endfor %}",
	"read in vain":     "{% set x = 'a' * 1000000 %}{% for i in range(100000) %}{% if 'b' in x %}{% endif %}{% endfor %}",
	"sorted":           "{% for i in range(100000) %}{% if range(10000) | sort | first %}{% endif %}{% endfor %}",
	"nested":           "{% set ns = namespace(x=[]) %}{% for i in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
	"wide":             "{{ '%999999999d' % 1 }}{{ 'a' | indent(1000000000, true) }}",
	"powers":           "{{ 10 ** 30 }}{{ 2 ** 2 ** 62 }}",
	"parentheses":      "{{ " + strings.Repeat("(", 60_000),
	"ifs":              strings.Repeat("{% if 1 %}", 6_000),
	"operators":        "{{ 1" + strings.Repeat("+1", 30_000) + " }}",
	"brackets":         "{{ " + strings.Repeat("[", 60_000),
	"names":            strings.Repeat("{{ x.", 12_000),
	"comments":         strings.Repeat("{# ", 20_000),
	"as large":         strings.Repeat("{% for a in range(99) %}{{ a ~ a }}{% endfor %}", 1_300),
	"as large, broken": strings.Repeat("{{ a }}", 9_000) + "{%",
}

// TestStrangers: a template that a client brings is refused within bounded work and memory, however it is made. The steps
// allowed are a sixteenth of what a model's own template has.
func TestStrangers(t *testing.T) {
	tok := load(t, "stories260k")
	in := tokenizer.ChatInput{Messages: []json.RawMessage{json.RawMessage(fmt.Sprintf(`{"role":"user","content":%q}`, strings.Repeat("hello ", 1000)))}}
	for name, src := range strangers {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		own, err := tok.WithRequestTemplate(src)
		if err == nil {
			var out string
			if out, err = own.RenderChat(t.Context(), in); err == nil {
				t.Errorf("%s: it renders %d bytes", name, len(out))
			}
		}
		runtime.ReadMemStats(&after)
		if made := (after.TotalAlloc - before.TotalAlloc) >> 20; made > 160 {
			t.Errorf("%s: %d MiB made, %v", name, made, err)
		}
		if err != nil && len(err.Error()) > 2000 {
			t.Errorf("%s: an error of %d bytes", name, len(err.Error()))
		}
	}

	// What clients may ask for: as many messages as a request has, each shown in some steps.
	list := make([]json.RawMessage, 2000)
	for i := range list {
		list[i] = json.RawMessage(`{"role":"user","content":"` + strings.Repeat("hello ", 40) + `"}`)
	}
	own, err := tok.WithRequestTemplate("{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|{{ m.role }}|>{{ m.content | trim + '\n' }}{% endif %}{% endfor %}")
	if err != nil || own.Fingerprint() != tok.Fingerprint() {
		t.Fatal(err)
	}
	if out, err := own.RenderChat(t.Context(), tokenizer.ChatInput{Messages: list}); err != nil || strings.Count(out, "<|user|>") != len(list) {
		t.Errorf("%d messages, %v", strings.Count(out, "<|user|>"), err)
	}
}
