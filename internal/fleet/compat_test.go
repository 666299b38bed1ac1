package fleet_test

import (
	"strings"
	"testing"
	"time"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/kvlayout"
)

func instance(id string, role fleet.Role) fleet.Instance {
	return fleet.Instance{
		ID: id, Epoch: 1, Role: role, URL: "http://127.0.0.1:1", KVAddr: "127.0.0.1:2", Dialect: "native",
		Model: "m", ModelFingerprint: "f", TokenizerFingerprint: "t", Numerics: "cpu", Parsers: "hermes/qwen3",
		Layout:      layout(5, 4, 8, "f32"),
		ProtocolMin: 1, ProtocolMax: 2,
	}
}

func layout(layers, heads, dim int, dtype kvlayout.DType) kvlayout.Form {
	return kvlayout.Plain(layers, heads, dim, 16, dtype).Form()
}

func TestCompatible(t *testing.T) {
	f := func(want string, change func(d *fleet.Instance)) {
		t.Helper()
		p, d := instance("p", fleet.Prefill), instance("d", fleet.Decode)
		change(&d)
		got := ""
		if m := fleet.Compatible(&p, &d); m != nil {
			got = m.Error()
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	f("", func(d *fleet.Instance) {})
	f("", func(d *fleet.Instance) { d.Layout.BlockTokens = 32; d.Build = "x"; d.MaxModelLen = 9 })
	f("", func(d *fleet.Instance) { d.ProtocolMin, d.ProtocolMax = 2, 3 })
	f("", func(d *fleet.Instance) { d.ProtocolMin, d.ProtocolMax = 1, 1 })
	f("protocol differs: prefill has 1-2, decode has 3-4", func(d *fleet.Instance) { d.ProtocolMin, d.ProtocolMax = 3, 4 })
	f("protocol differs: prefill has 1-2, decode has 0-0", func(d *fleet.Instance) { d.ProtocolMin, d.ProtocolMax = 0, 0 })
	f("model differs: prefill has m, decode has n", func(d *fleet.Instance) { d.Model = "n" })
	f("", func(d *fleet.Instance) { d.Version = "1" }) // of one that does not say
	f("model_fingerprint differs: prefill has f, decode has (none)", func(d *fleet.Instance) { d.ModelFingerprint = "" })
	f("tokenizer_fingerprint differs: prefill has t, decode has u", func(d *fleet.Instance) { d.TokenizerFingerprint = "u" })
	f("numerics differs: prefill has cpu, decode has cuda", func(d *fleet.Instance) { d.Numerics = "cuda" })
	f("parsers differs: prefill has hermes/qwen3, decode has none/none", func(d *fleet.Instance) { d.Parsers = "none/none" })
	f("", func(d *fleet.Instance) { d.Parsers = "" }) // of one that does not say
	f("dialect differs: prefill has native, decode has vllm", func(d *fleet.Instance) { d.Dialect = "vllm" })
	f("layout.groups[0].layers differs: prefill has 0-4, decode has 0-5", func(d *fleet.Instance) { d.Layout = layout(6, 4, 8, "f32") })
	f("layout.groups[0].heads differs: prefill has 0+4 of 4, decode has 0+2 of 2", func(d *fleet.Instance) { d.Layout = layout(5, 2, 8, "f32") })
	f("layout.groups[0].planes differs: prefill has k:8,v:8, decode has k:16,v:16", func(d *fleet.Instance) { d.Layout = layout(5, 4, 16, "f32") })
	f("layout.groups[0].dtype differs: prefill has f32, decode has bf16", func(d *fleet.Instance) { d.Layout = layout(5, 4, 8, "bf16") })
	f(`layout.groups differs: prefill has [{"kind":"full","layers":"0-4","planes":[{"name":"k","dim":8},{"..., decode has (none)`, func(d *fleet.Instance) { d.Layout.Groups = "" })
	f("", func(d *fleet.Instance) { d.Layout.BlockTokens = 0 })
	f("numerics differs: prefill has cpu, decode has cuda", func(d *fleet.Instance) { d.Convert, d.Layout, d.Numerics = true, layout(5, 4, 8, "bf16"), "cuda" })
}

// TestCompatibleVersions: engines that say their version must say the same one.
func TestCompatibleVersions(t *testing.T) {
	for _, c := range []struct {
		prefill, decode string
		ok              bool
	}{{"", "", true}, {"1", "1", true}, {"1", "2", false}, {"1", "", true}, {"", "1", true}} {
		p, d := instance("p", fleet.Prefill), instance("d", fleet.Decode)
		p.Version, d.Version = c.prefill, c.decode
		if m := fleet.Compatible(&p, &d); (m == nil) != c.ok || m != nil && m.Field != "version" {
			t.Errorf("%+v: %v", c, m)
		}
	}
}

// SGLang's decode fails when its blocks are of another size, where both are known.
func TestCompatibleSGLang(t *testing.T) {
	for _, c := range []struct{ prefill, decode int }{{16, 16}, {16, 64}, {0, 64}, {16, 0}, {1, 1}, {1, 64}, {16, 1}} {
		p, d := instance("p", fleet.Prefill), instance("d", fleet.Decode)
		p.Dialect, d.Dialect, p.Layout.BlockTokens, d.Layout.BlockTokens = "sglang", "sglang", c.prefill, c.decode
		if m := fleet.Compatible(&p, &d); (m != nil) != (c.prefill != c.decode && c.prefill*c.decode > 0) {
			t.Errorf("%+v: %v", c, m)
		}
	}
}

// A pair needs a secret that both have, or none at either end.
func TestCompatibleBySecret(t *testing.T) {
	f := func(want, prefill, decode string) {
		t.Helper()
		p, d := instance("p", fleet.Prefill), instance("d", fleet.Decode)
		p.Secrets, d.Secrets = prefill, decode
		got := ""
		if m := fleet.Compatible(&p, &d); m != nil {
			got = m.Error()
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		var all []string
		for _, r := range fleet.NewSnapshot(1, time.Now(), []fleet.Member{
			{Instance: p, State: fleet.Live}, {Instance: d, State: fleet.Live}}).Refusals() {
			all = append(all, r.Mismatch.Error())
		}
		if told := strings.Join(all, "\n"); want != "" && told != want+"\n"+want || want == "" && told != "" {
			t.Errorf("refusals are %q", told)
		}
	}
	f("", "", "")
	f("", "3238efab", "3238efab")
	f("", "0c55e1f0+3238efab", "3238efab")
	f("", "3238efab+0c55e1f0", "0c55e1f0+3238efab")
	f("fleet_secret differs: prefill has 3238efab, decode has 0c55e1f0", "3238efab", "0c55e1f0")
	f("fleet_secret differs: prefill has (none), decode has 0c55e1f0", "", "0c55e1f0")
	f("fleet_secret differs: prefill has 3238efab+0c55e1f0, decode has (none)", "3238efab+0c55e1f0", "")
	f("fleet_secret differs: prefill has +, decode has +3238efab", "+", "+3238efab")
}

// Members that differ in their secrets alone are not taken for each other.
func TestRefusalsBySecret(t *testing.T) {
	m := func(id string, role fleet.Role, secrets string) fleet.Member {
		i := instance(id, role)
		i.Secrets = secrets
		return fleet.Member{Instance: i, State: fleet.Live}
	}
	got := fleet.NewSnapshot(1, time.Now(), []fleet.Member{m("d1", fleet.Decode, "aa"), m("d2", fleet.Decode, "bb+aa"), m("d3", fleet.Decode, ""),
		m("p1", fleet.Prefill, "aa"), m("p2", fleet.Prefill, "aa+bb")}).Refusals()
	if len(got) != 1 || got[0].ID != "d3" || got[0].Refused != 2 || got[0].Mismatch.Field != "fleet_secret" {
		t.Errorf("refused are %v", got)
	}
}

// Both must allow a conversion, and only another dtype
// excuses other numerics.
func TestCompatibleByConversion(t *testing.T) {
	f := func(want string, change func(p, d *fleet.Instance)) {
		t.Helper()
		p, d := instance("p", fleet.Prefill), instance("d", fleet.Decode)
		p.Convert, d.Convert, d.Layout, d.Numerics = true, true, layout(5, 4, 8, "bf16"), "cuda"
		change(&p, &d)
		got := ""
		if m := fleet.Compatible(&p, &d); m != nil {
			got = m.Field
		}
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	f("", func(p, d *fleet.Instance) {})
	f("numerics", func(p, d *fleet.Instance) { p.Convert = false })
	f("numerics", func(p, d *fleet.Instance) { d.Layout = layout(5, 4, 8, "f32") })
	f("layout.groups[0].heads", func(p, d *fleet.Instance) { d.Layout = layout(5, 2, 8, "bf16") })
}

func TestRefusals(t *testing.T) {
	f := func(want string, members ...fleet.Member) {
		t.Helper()
		var got []string
		for _, r := range fleet.NewSnapshot(1, time.Now(), members).Refusals() {
			got = append(got, r.String())
		}
		if s := strings.Join(got, "\n"); s != want {
			t.Errorf("got\n%s\nwant\n%s", s, want)
		}
	}
	m := func(id string, role fleet.Role, numerics string, state fleet.State) fleet.Member {
		i := instance(id, role)
		i.Numerics = numerics
		return fleet.Member{Instance: i, State: state}
	}
	p, d := fleet.Prefill, fleet.Decode
	f("", m("p", p, "cpu", fleet.Live))
	f("", m("p", p, "cpu", fleet.Live), m("d", d, "cpu", fleet.Live))
	f("", m("p", p, "cpu", fleet.Live), m("d", d, "gpu", fleet.Dead))
	f("decode d2 cannot be paired with 2 of 2, such as p1: numerics differs: prefill has cpu, decode has gpu",
		m("p1", p, "cpu", fleet.Live), m("p2", p, "cpu", fleet.Live),
		m("d1", d, "cpu", fleet.Live), m("d2", d, "gpu", fleet.Live))
	f("decode d2 cannot be paired with 1 of 1, such as p: numerics differs: prefill has cpu, decode has gpu\n"+
		"decode d3 cannot be paired with 1 of 1, such as p: numerics differs: prefill has cpu, decode has gpu\n"+
		"prefill p cannot be paired with 2 of 3, such as d2: numerics differs: prefill has cpu, decode has gpu",
		m("d1", d, "cpu", fleet.Live), m("d2", d, "gpu", fleet.Live), m("d3", d, "gpu", fleet.Live),
		m("p", p, "cpu", fleet.Live))
	f("decode d cannot be paired with 2 of 2, such as p1: numerics differs: prefill has cpu, decode has gpu\n"+
		"prefill p1 cannot be paired with 1 of 1, such as d: numerics differs: prefill has cpu, decode has gpu\n"+
		"prefill p2 cannot be paired with 1 of 1, such as d: numerics differs: prefill has tpu, decode has gpu",
		m("d", d, "gpu", fleet.Live), m("p1", p, "cpu", fleet.Live), m("p2", p, "tpu", fleet.Live)) // of equally many the first
	f("decode d cannot be paired with 3 of 3, such as p2: numerics differs: prefill has tpu, decode has gpu\n"+
		"prefill p1 cannot be paired with 1 of 1, such as d: numerics differs: prefill has cpu, decode has gpu\n"+
		"prefill p2 cannot be paired with 1 of 1, such as d: numerics differs: prefill has tpu, decode has gpu\n"+
		"prefill p3 cannot be paired with 1 of 1, such as d: numerics differs: prefill has tpu, decode has gpu",
		m("d", d, "gpu", fleet.Live), m("p1", p, "cpu", fleet.Live), m("p2", p, "tpu", fleet.Live), m("p3", p, "tpu", fleet.Live)) // the most frequent
}

func TestUsable(t *testing.T) {
	draining := instance("p2", fleet.Prefill)
	draining.Draining = true
	s := fleet.NewSnapshot(1, time.Now(), []fleet.Member{
		{Instance: instance("p3", fleet.Prefill), State: fleet.Live},
		{Instance: draining, State: fleet.Live},
		{Instance: instance("p1", fleet.Prefill), State: fleet.Live},
		{Instance: instance("p0", fleet.Prefill), State: fleet.Suspect},
		{Instance: instance("d0", fleet.Decode), State: fleet.Live},
	})
	var got []string
	for m := range s.Usable(fleet.Prefill) {
		got = append(got, m.ID)
	}
	if strings.Join(got, " ") != "p1 p3" {
		t.Fatal(got)
	}
	if s.Get("d0").Role != fleet.Decode || s.Get("x") != nil {
		t.Fatal("lookup")
	}
}
