package gpus_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/internal/gpus"
)

func TestParseDevice(t *testing.T) {
	f := func(text, want, wrong string) {
		t.Helper()
		d, err := gpus.ParseDevice(text)
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%q: %v, want %q", text, err, wrong)
		}
		if got := fmt.Sprint(d.Auto, d.CPU, d.GPUs); err == nil && got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	f("auto", "true false []", "")
	f("cpu", "false true []", "")
	f("cuda", "false false []", "")
	f("cuda:2", "false false [cuda:2]", "")
	f("cuda:0,cuda:1", "false false [cuda:0 cuda:1]", "")
	f("cuda:0, cuda:0", "false false [cuda:0 cuda:0]", "")
	f("cuda:GPU-5f2c-8,cuda:MIG-GPU-1/2/0", "false false [cuda:GPU-5f2c-8 cuda:MIG-GPU-1/2/0]", "")
	f("gpu", "", `"gpu" is none of auto, cpu, cuda, cuda:INDEX and cuda:UUID`)
	f("", "", `"" is none of`)
	f("2", "", `"2" is none of`)
	f("cuda:", "", `"cuda:" names no GPU`)
	f("cuda:x", "", `"cuda:x" names no GPU: want cuda:2`)
	f("cuda:-1", "", "names no GPU")
	f("cuda:+1", "", "names no GPU")
	f("cuda:1000", "", "names no GPU")
	f("cuda:99999999999999999999", "", "names no GPU")
	f("cuda:GPU-1 2", "", "names no GPU")
	f("cuda:GPU-"+strings.Repeat("a", 100), "", "names no GPU")
	f("cuda:0,1", "", `"1" names no GPU`)
	f("cuda:0,", "", `"" names no GPU`)
	f(strings.TrimSuffix(strings.Repeat("cuda:0,", 1025), ","), "", "more than 1024")
}

func TestParseChoice(t *testing.T) {
	f := func(text, want, wrong string) {
		t.Helper()
		c, err := gpus.ParseChoice(text)
		if (err != nil) != (wrong != "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%q: %v, want %q", text, err, wrong)
		}
		if got := fmt.Sprint(c.All, c.Count, c.Names); err == nil && got != want {
			t.Errorf("%q: %s, want %s", text, got, want)
		}
	}
	f("", "false 0 []", "")
	f("all", "true 0 []", "")
	f(",", "", `"," names no GPU: want all, how many, or a list`)
	f(" , ,", "", `names no GPU: want all`)
	f("4", "false 4 []", "")
	f("cuda:0,cuda:2", "false 0 [cuda:0 cuda:2]", "")
	f("0", "", "want 1 to 999")
	f("-1", "", "want 1 to 999")
	f("1000", "", "want 1 to 999")
	f("0, 2", "", "write cuda:0,cuda:2")
	f("some", "", `"some" names no GPU`)
}

// FuzzParse: what is read is what was written, and never too much.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"auto", "cuda", "all", "4", "cuda:0,cuda:GPU-1f", "0,2", "cuda:MIG-GPU-1/2/0", "cuda:,", "cuda:\x00"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if _, err := gpus.ParseChoice(text); err != nil && len(err.Error()) > 1000 {
			t.Errorf("an error of %d bytes", len(err.Error()))
		}
		d, err := gpus.ParseDevice(text)
		if err != nil {
			if len(err.Error()) > 1000 {
				t.Errorf("an error of %d bytes", len(err.Error()))
			}
			return
		}
		var again []string
		for _, n := range d.GPUs {
			again = append(again, n.String())
		}
		if names, err := gpus.ParseNames(strings.Join(again, ",")); len(again) > 0 && (err != nil || !slices.Equal(names, d.GPUs)) {
			t.Errorf("%q is %q, again %q, %v", text, d.GPUs, names, err)
		}
	})
}
