package cluster_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/xpyd/xpyd/e2e/cluster"
)

// TestCache: a cached test result depends on everything that the binary is built from, which the
// test's process reports to go test.
func TestCache(t *testing.T) {
	const child = "XPYD_E2E_CACHE"
	if os.Getenv(child) != "" {
		cluster.Binary(t)
		return
	}
	file := filepath.Join(t.TempDir(), "log")
	cmd := exec.Command(os.Args[0], "-test.run=^TestCache$", "-test.testlogfile="+file)
	cmd.Env = append(os.Environ(), child+"=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"go.mod", "cmd/xpyd", "router", "router/pick", "worker", "kernels/cpu", "router/console/dashboard/index.html", "internal/model/stories260k/model.safetensors"} {
		if !strings.Contains(string(b), "open "+filepath.Join(root, want)+"\n") {
			t.Errorf("the result does not depend on %s", want)
		}
	}
	if !strings.Contains(string(b), "getenv GOFLAGS\n") {
		t.Error("the result does not depend on GOFLAGS")
	}
}
