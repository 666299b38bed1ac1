package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/internal/trust"
)

// roles are the commands that read a configuration file, which are also the
// names of its samples.
var roles = []string{"router", "prefill", "decode", "up"}

// keyLine is a key of a sample that is commented out: no space after the #.
var keyLine = regexp.MustCompile(`(?m)^(\s*)#(\S)`)

// inForce is what --print-config says, and its keys with their values.
func inForce(t *testing.T, args ...string) (string, map[string]string) {
	t.Helper()
	out, errs, code := xpyd(t, append(args, "--print-config")...)
	if code != exitDone {
		t.Fatalf("%v: %d %s", args, code, errs)
	}
	return out, flatten(t, out)
}

// flatten turns YAML into dotted keys and the text of their values.
func flatten(t *testing.T, text string) map[string]string {
	t.Helper()
	var doc yaml.Node
	if err := yaml.Unmarshal([]byte(text), &doc); err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	var walk func(key string, n *yaml.Node)
	walk = func(key string, n *yaml.Node) {
		if n.Kind != yaml.MappingNode {
			out[key] = fmt.Sprint(n.Kind, n.Value, len(n.Content))
			return
		}
		for i := 0; i < len(n.Content); i += 2 {
			walk(strings.TrimPrefix(key+"."+n.Content[i].Value, "."), n.Content[i+1])
		}
	}
	walk("", doc.Content[0])
	return out
}

// TestSamples: every sample parses and changes nothing; with its keys taken
// out of their comments it holds every key there is, at its default.
func TestSamples(t *testing.T) {
	files, err := filepath.Glob("../../configs/samples/*.yaml")
	if err != nil || len(files) != len(roles) {
		t.Fatalf("%v, %v", files, err)
	}
	for _, role := range roles {
		sample := filepath.Join("../../configs/samples", role+".yaml")
		text, err := os.ReadFile(sample)
		if err != nil {
			t.Fatal(err)
		}
		want, wantKeys := inForce(t, role)
		if got, _ := inForce(t, role, "--config", sample); got != want {
			t.Errorf("%s changes a default:\n%s\nwant\n%s", sample, got, want)
		}
		all := keyLine.ReplaceAllString(string(text), "$1$2")
		full := filepath.Join(t.TempDir(), "full.yaml")
		if err := os.WriteFile(full, []byte(all), 0o600); err != nil {
			t.Fatal(err)
		}
		_, gotKeys := inForce(t, role, "--config", full)
		named := flatten(t, all)
		for key, value := range wantKeys {
			if _, ok := named[key]; !ok {
				t.Errorf("%s lacks %s", sample, key)
			}
			// Where the data folder is depends on the machine.
			if gotKeys[key] != value && key != "data" {
				t.Errorf("%s says %s: %s, the default is %s", sample, key, gotKeys[key], value)
			}
		}
	}
}

// TestComposeConfigs: the files that docker-compose.yml mounts, and that what is
// secret in the environment does not show.
func TestComposeConfigs(t *testing.T) {
	for _, role := range []string{"prefill", "decode"} {
		if out, _ := inForce(t, role, "--config", filepath.Join("../../configs/compose", role+".yaml")); !strings.Contains(out, "join_file: /fleet/xpyd/join-url\n") {
			t.Errorf("%s: no join file:\n%s", role, out)
		}
	}
	t.Setenv("XPYD_FLEET__URL", "nats://xpyd:hunter2@nats:4222")
	t.Setenv("XPYD_JOIN", "nats://xpyd:hunter2@nats:4222#"+trust.NewSecret().Reveal())
	out, _ := inForce(t, "router", "--config", "../../configs/compose/router.yaml")
	if strings.Contains(out, "hunter2") || !strings.Contains(out, "join: '********'") || !strings.Contains(out, "nats://xpyd:********@nats:4222") {
		t.Errorf("a secret shows, or that there is one does not:\n%s", out)
	}
}

// TestEngineConfigs: the examples of foreign engines are understood.
func TestEngineConfigs(t *testing.T) {
	files, err := filepath.Glob("../../configs/engines/*.yaml")
	if err != nil || len(files) < 5 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		if out, _ := inForce(t, "router", "--config", file); !strings.Contains(out, "dialect: ") {
			t.Errorf("%s: no dialect in\n%s", file, out)
		}
	}
}

// TestInvalid: every file of configs/invalid is refused with exit code 2 and
// one line that has the place and begins as its first line says. The command
// is the first word of the file's name.
func TestInvalid(t *testing.T) {
	files, err := filepath.Glob("../../configs/invalid/*.yaml")
	if err != nil || len(files) < 40 {
		t.Fatalf("%d files, %v", len(files), err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		first, _, _ := strings.Cut(string(text), "\n")
		want, ok := strings.CutPrefix(first, "# want: ")
		role, _, _ := strings.Cut(filepath.Base(file), "-")
		if !ok || !slices.Contains(roles, role) {
			t.Errorf("%s: no command in its name, or no \"# want: \" in its first line", file)
			continue
		}
		out, errs, code := xpyd(t, role, "--config", file)
		if code != exitUsage || out != "" || !strings.HasPrefix(errs, "xpyd: "+file+":"+want) || strings.Count(errs, "\n") != 1 {
			t.Errorf("%s: exit code %d, %q", file, code, errs)
		}
	}
}

// TestPrintConfig: what is printed parses back to the same, wherever it came
// from.
func TestPrintConfig(t *testing.T) {
	f := func(args ...string) {
		t.Helper()
		out, _ := inForce(t, args...)
		file := filepath.Join(t.TempDir(), "printed.yaml")
		if err := os.WriteFile(file, []byte(out), 0o600); err != nil {
			t.Fatal(err)
		}
		if again, _ := inForce(t, args[0], "--config", file); again != out {
			t.Errorf("%v: printed\n%s\nread back\n%s", args, out, again)
		}
	}
	for _, role := range roles {
		f(role)
	}
	f("router", "--listen", "0.0.0.0:80", "--admin", "", "--nats", "nats://127.0.0.1:4222", "--data", "/tmp/x y", "--log-format", "json")
	f("prefill", "--join-file", "/run/xpyd/join-url", "--model", "hf:a/b@main", "--kv-memory", "3GiB", "--id", "p-0", "--threads", "3")
	f("up", "--prefill", "3", "--decode", "2", "--block-tokens", "7", "--device", "cpu")
	t.Setenv("XPYD_LIMITS_MAX_QUEUE", "7")
	t.Setenv("XPYD_API_KEYS", "") // an empty list
	t.Setenv("XPYD_READ_TIMEOUT", "1m30s")
	out, keys := inForce(t, "router")
	if keys["limits.max_queue"] != "870" || !strings.Contains(out, "read_timeout: 1m30s") {
		t.Errorf("the environment is not in force:\n%s", out)
	}
	f("router")
	// A secret is masked, never printed.
	t.Setenv("XPYD_FLEET__CLUSTER_PASSWORD", "hunter2")
	if out, _ := inForce(t, "router"); strings.Contains(out, "hunter2") {
		t.Errorf("a password shows:\n%s", out)
	}
}

// TestUpDividesGPU: workers of one `up` share a GPU, and each is told its part.
func TestUpDividesGPU(t *testing.T) {
	w := workerDefaults(fleet.Decode)
	c := upConfig{Prefill: 1, Decode: 3, Compute: w.Compute, KV: w.KV, RouterConfig: RouterConfig{Log: w.Log}}
	c.GPUMemory, c.BatchInvariant = 0.9, true
	env, err := c.environ([]string{"HOME=/h", "XPYD_KV_MEMORY=1GiB", "XPYD_CUDA_LIB=/l.so"})
	if want := []string{"HOME=/h", "XPYD_CUDA_LIB=/l.so", "XPYD_GPU_MEMORY=0.225", "XPYD_BATCH_INVARIANT=true"}; err != nil || !slices.Equal(env, want) {
		t.Errorf("%v, %q, want %q", err, env, want)
	}
}
