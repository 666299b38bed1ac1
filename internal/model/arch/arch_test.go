package arch_test

import (
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/model/arch"
	"github.com/xpyd/xpyd/internal/model/modeltest"
	"github.com/xpyd/xpyd/kernels"
)

// Every family's tensors: one a place and a name, in layers that there are, whose
// kinds a backend can tell, and with the names that readers take for a layer's.
func TestFamilies(t *testing.T) {
	names := map[string]bool{}
	for _, f := range arch.Families() {
		t.Run(f.Name, func(t *testing.T) {
			for _, n := range append([]string{f.Name}, f.Also...) {
				if names[n] {
					t.Errorf("model_type %q is two families'", n)
				}
				names[n] = true
			}
			if f.Class == "" {
				t.Error("no class")
			}
			c := modeltest.Tiny(f.Name)
			if err := c.Validate(); err != nil {
				t.Fatal(err)
			}
			places, seen := map[arch.Place]bool{}, map[string]bool{}
			for _, w := range c.Tensors() {
				if places[w.Place] || seen[w.Name] || seen[w.GGUF] && (w.Stacked == 0 || w.Expert == 0) || w.Name == "" || w.GGUF == "" {
					t.Errorf("%+v: its place or a name is taken, or it has none", w)
				}
				places[w.Place], seen[w.Name], seen[w.GGUF] = true, true, true
				if inLayer := w.Role > arch.Head; arch.InLayer(w.Name) != inLayer || arch.InLayer(w.GGUF) != inLayer || w.Layer < 0 || w.Layer >= c.Layers {
					t.Errorf("%+v: in a layer or not?", w)
				}
				if w.Role.Projection() != (len(w.Shape) == 2 && w.Role > arch.Head && w.Role != arch.Router) || w.Expert >= max(1, w.Stacked) || slices.Min(w.Shape) < 1 {
					t.Errorf("%s: shape %v", w.Name, w.Shape)
				}
				if p := w.PairedHeads; p != 0 && w.Shape[0]%(2*p) != 0 {
					t.Errorf("%s: %d rows in pairs of %d heads", w.Name, w.Shape[0], p)
				}
			}
			for l := range c.Layers {
				if a, ff := c.Layer(l); a == "" || ff == "" {
					t.Errorf("layer %d is %q, %q", l, a, ff)
				}
			}
		})
	}
}

// What no family is has no tensors and no layers, and nobody takes it for one.
func TestNoFamily(t *testing.T) {
	c := modeltest.Tiny("llama")
	c.ModelType = "falcon"
	if a, ff := c.Layer(0); a != "" || ff != "" || c.Tensors() != nil {
		t.Errorf("%q, %q, %v", a, ff, c.Tensors())
	}
	refused := func(err error, what string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), what+` "falcon" is not supported (`) {
			t.Errorf("error %v", err)
		}
		for _, f := range arch.Families() {
			if name := f.Name; what != "general.architecture" && !strings.Contains(err.Error(), name) {
				t.Errorf("%v does not say that %s is served", err, name)
			}
		}
	}
	refused(c.Validate(), "architecture")
	_, err := arch.ReadHF([]byte(`{"model_type": "falcon", "num_local_experts": "eight"}`))
	refused(err, "model_type")
	_, err = arch.ReadGGUF(map[string]any{"general.architecture": "falcon"}, nil, nil)
	refused(err, "general.architecture")
}

// config.json of every family, and of the other names that it goes by, is read as it was meant.
func TestReadHF(t *testing.T) {
	for _, f := range arch.Families() {
		for _, name := range append([]string{f.Name}, f.Also...) {
			t.Run(name, func(t *testing.T) {
				c := modeltest.Tiny(f.Name)
				c.MaxPositions = 1024
				written := modeltest.ConfigJSON(c, kernels.F32)
				written["model_type"] = name
				got, err := arch.ReadHF(configWith(t, written))
				if err != nil || !reflect.DeepEqual(got, c) {
					t.Errorf("%+v, want %+v: %v", got, c, err)
				}
				if j := modeltest.ConfigJSON(c, kernels.F32); !reflect.DeepEqual(j["architectures"], []string{f.Class}) {
					t.Errorf("written as %v", j["architectures"])
				}
			})
		}
	}
}

// A config.json that sets head_dim leaves the family's default as it was.
func TestDefaultsStay(t *testing.T) {
	const head = `{"model_type":"qwen3","vocab_size":32,"hidden_size":64,"intermediate_size":64,"num_hidden_layers":1,` +
		`"num_attention_heads":2,"max_position_embeddings":64`
	for _, c := range []struct {
		rest string
		want int
	}{{`,"head_dim":16}`, 16}, {`}`, 128}} {
		if got, err := arch.ReadHF([]byte(head + c.rest)); err != nil || got.HeadDim != c.want {
			t.Errorf("%s: head_dim %d, %v, want %d", c.rest, got.HeadDim, err, c.want)
		}
	}
}

// TestFamiliesTold: users read in docs which families are served.
func TestFamiliesTold(t *testing.T) {
	text, err := os.ReadFile("../../../docs/models-and-gpus.md")
	if err != nil {
		t.Fatal(err)
	}
	told := ""
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, " families, from one of these:") {
			told = strings.ToLower(line)
		}
	}
	for _, f := range arch.Families() {
		if !strings.Contains(told, f.Name) {
			t.Errorf("%s is not in %q", f.Name, told)
		}
	}
}
