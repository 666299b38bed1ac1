// Package chart tests the Helm chart without Helm and Kubernetes, by what it renders
// (testdata, made by scripts/chart-test --update): its pods run as plain processes, with
// their own arguments, environment, files and probes. Only hosts, ports and the paths of
// mounts are replaced.
package chart

import (
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/xpyd/xpyd/e2e/cluster"
)

func TestMain(m *testing.M) { os.Exit(cluster.Main(m)) }

// TestSums: testdata is of the chart and the cases as they are.
func TestSums(t *testing.T) {
	const from = "../../deploy/helm"
	var names []string
	err := filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	var sums strings.Builder
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&sums, "%x  .%s\n", sha256.Sum256(b), strings.TrimPrefix(name, from))
	}
	want, err := os.ReadFile("testdata/sums")
	if err != nil {
		t.Fatal(err)
	}
	if sums.String() != string(want) {
		t.Errorf("the chart has changed since testdata was made: run scripts/chart-test --update\n%s", sums.String())
	}
}

// TestConfigs: xpyd takes every configuration of every case.
func TestConfigs(t *testing.T) {
	for name, all := range cases(t) {
		for _, w := range workloads(all) {
			t.Run(name+"/"+w.Metadata.Name, func(t *testing.T) {
				m := newMachine(t, all)
				p := m.place(t, w, 0)
				out, stderr, code := runWith(t, p.env, append(p.args, "--print-config")...)
				if code != 0 || !strings.Contains(out, "join_file: "+p.dir) {
					t.Errorf("exit code %d\n%s%s", code, stderr, out)
				}
			})
		}
	}
}

// TestGrace: a pod has longer to end than xpyd takes for it.
func TestGrace(t *testing.T) {
	for name, all := range cases(t) {
		for _, w := range workloads(all) {
			spec := w.Spec.Template.Spec
			c := spec.Containers[0]
			takes := 30*time.Second + time.Duration(c.Lifecycle.PreStop.Sleep.Seconds)*time.Second // a router: shutdownTimeout
			if w.Kind == "Deployment" {
				var config struct {
					Drain time.Duration `yaml:"drain_timeout"`
				}
				text := find(all, "ConfigMap", w.Metadata.Name).Data[filepath.Base(c.Args[2])]
				if err := yaml.Unmarshal([]byte(text), &config); err != nil || config.Drain == 0 {
					t.Fatalf("%s: %v in\n%s", w.Metadata.Name, err, text)
				}
				takes = config.Drain + time.Second
			} else if c.Lifecycle.PreStop.Sleep.Seconds == 0 {
				t.Errorf("%s: the router ends before Services forget it", name)
			}
			if grace := time.Duration(spec.Grace) * time.Second; grace < takes+5*time.Second {
				t.Errorf("%s: %s is killed after %v, and takes up to %v", name, w.Metadata.Name, grace, takes)
			}
		}
	}
}

// machine places the pods of a release on this machine.
type machine struct {
	all  []object
	addr map[string]string // pod name:container port -> address here
	made int
}

// placed is a pod that is ready to run.
type placed struct {
	name, dir string
	env, args []string
	c         container
}

func newMachine(t *testing.T, all []object) *machine {
	t.Helper()
	return &machine{all: all, addr: map[string]string{}}
}

func (m *machine) at(t *testing.T, pod string, port string) string {
	t.Helper()
	key := pod + ":" + port
	if m.addr[key] == "" {
		m.addr[key] = cluster.Port(t)
	}
	return m.addr[key]
}

var (
	everywhere = regexp.MustCompile(`0\.0\.0\.0:(\d+)`)
	router     = regexp.MustCompile(`([a-z-]+-router-\d)\.[a-z-]+-routers\.serving\.svc:(\d+)`)
	service    = regexp.MustCompile(`([a-z]+(?:-[a-z]+)*)-nats\.serving\.svc:(\d+)`)
)

// here has a text say this machine's addresses and paths. One router after the other is what the
// Service of NATS leads to.
func (m *machine) here(t *testing.T, pod, dir, text string) string {
	t.Helper()
	text = everywhere.ReplaceAllStringFunc(text, func(a string) string { return m.at(t, pod, everywhere.FindStringSubmatch(a)[1]) })
	text = router.ReplaceAllStringFunc(text, func(a string) string {
		parts := router.FindStringSubmatch(a)
		return m.at(t, parts[1], parts[2])
	})
	text = service.ReplaceAllStringFunc(text, func(a string) string {
		parts := service.FindStringSubmatch(a)
		m.made++
		return m.at(t, fmt.Sprintf("%s-router-%d", parts[1], m.made%2), parts[2])
	})
	return strings.NewReplacer("/etc/xpyd/", dir+"/etc/xpyd/", "/dev/shm/", dir+"/", "/models", dir+"/models").Replace(text)
}

// place writes the files of a workload's pod number n, as the kubelet does.
func (m *machine) place(t *testing.T, w object, n int) *placed {
	t.Helper()
	spec := w.Spec.Template.Spec
	p := &placed{name: fmt.Sprintf("%s-%d", w.Metadata.Name, n), dir: t.TempDir(), c: spec.Containers[0]}
	write := func(path, text string) {
		t.Helper()
		path = filepath.Join(p.dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(m.here(t, p.name, p.dir, text)), 0o440); err != nil {
			t.Fatal(err)
		}
	}
	for _, mount := range p.c.Mounts {
		for _, v := range spec.Volumes {
			if v.Name != mount.Name {
				continue
			}
			for file, text := range find(m.all, "ConfigMap", v.ConfigMap.Name).Data {
				write(filepath.Join(mount.Path, file), text)
			}
			for _, item := range v.Secret.Items {
				write(filepath.Join(mount.Path, item.Path), m.secret(t, v.Secret.Name, item.Key))
			}
		}
	}
	for _, e := range p.c.Env {
		value := e.Value
		switch from := e.ValueFrom; {
		case from.Field.Path == "metadata.name":
			value = p.name
		case from.Field.Path == "status.podIP":
			value = "127.0.0.1"
		case from.Secret.Name != "":
			value = m.secret(t, from.Secret.Name, from.Secret.Key)
		}
		p.env = append(p.env, e.Name+"="+m.here(t, p.name, p.dir, value))
	}
	for _, a := range p.c.Args {
		p.args = append(p.args, m.here(t, p.name, p.dir, a))
	}
	return p
}

// secret reads a Secret of the chart; of one that the user names it makes a value.
func (m *machine) secret(t *testing.T, name, key string) string {
	t.Helper()
	o := find(m.all, "Secret", name)
	if o.Kind == "" {
		return map[string]string{"join-url": "nats://xpyd-nats.serving.svc:4222#AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"}[key]
	}
	b, err := base64.StdEncoding.DecodeString(o.Data[key])
	if err != nil || len(b) == 0 {
		t.Fatalf("secret %s has no %s: %v", name, key, err)
	}
	return string(b)
}

// passes asks what the kubelet asks.
func (m *machine) passes(t *testing.T, client *http.Client, p *placed, ask probe) error {
	t.Helper()
	for _, port := range p.c.Ports {
		if port.Name != ask.HTTP.Port {
			continue
		}
		resp, err := client.Get("http://" + m.at(t, p.name, strconv.Itoa(port.Port)) + ask.HTTP.Path)
		if err != nil {
			return err
		}
		resp.Body.Close()
		if resp.StatusCode >= 400 {
			return fmt.Errorf("%s: %s%s: %s", p.name, port.Name, ask.HTTP.Path, resp.Status)
		}
		return nil
	}
	return fmt.Errorf("%s has no port %s", p.name, ask.HTTP.Port)
}

func runWith(t *testing.T, env []string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	p := cluster.Start(t, env, args...)
	code = p.Exit(t, 30*time.Second)
	return p.Stdout.String(), p.Stderr.String(), code
}

// TestServes runs the default release: two routers, whose NATS servers are one, a worker that has joined at
// each of them; every probe passes, both routers serve and know of each other, and what autoscalers follow is there.
func TestServes(t *testing.T) {
	all := rendered(t, "testdata/default.yaml")
	m := newMachine(t, all)
	client := cluster.NewClient(t)
	var pods []*placed
	procs := map[string]*cluster.Process{}
	for _, w := range workloads(all) {
		for n := range w.Spec.Replicas {
			p := m.place(t, w, n)
			pods = append(pods, p)
			procs[p.name] = cluster.Start(t, p.env, p.args...)
		}
	}
	if len(pods) != 4 {
		t.Fatalf("%d pods", len(pods))
	}
	var routers []*placed
	for _, p := range pods {
		for what, ask := range map[string]probe{"startup": p.c.Startup, "liveness": p.c.Liveness, "readiness": p.c.Readiness} {
			cluster.Wait(t, 30*time.Second, p.name+": "+what, func() error { return m.passes(t, client, p, ask) })
		}
		if p.args[0] == "router" {
			routers = append(routers, p)
		}
	}
	for _, p := range routers {
		url := "http://" + m.at(t, p.name, "8000")
		r := cluster.Post(t.Context(), client, url+"/v1/completions", `{"prompt":"Once upon a time","max_tokens":8,"temperature":0,"stream":true}`)
		if !r.Good() || r.Text != ", there was a little girl" || r.Prefill != "xpyd-prefill-0" || r.Decode != "xpyd-decode-0" {
			t.Errorf("%s: %v %q", p.name, r, r.Text)
		}
		admin := "http://" + m.at(t, p.name, "8001")
		for name, want := range map[string]float64{"xpyd_router_peers": 1, "xpyd_router_ready": 1} {
			cluster.Wait(t, 30*time.Second, p.name+": "+name, func() error {
				if v, err := cluster.ReadMetric(client, admin, name); err != nil || v != want {
					return fmt.Errorf("%v, %v", v, err)
				}
				return nil
			})
		}
		out, stderr, code := runWith(t, p.env, "status", "--data", p.dir+"/xpyd")
		if code != 0 || !strings.Contains(out, "xpyd-decode-0") {
			t.Errorf("status in the pod: %d %s%s", code, out, stderr)
		}
		if q, _ := http.NewRequestWithContext(t.Context(), "GET", admin+"/admin/v1/planner", nil); q != nil {
			q.Header.Set("Authorization", "Bearer read-only-token-of-the-tests")
			resp, err := client.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			if resp.StatusCode != 200 {
				t.Errorf("the Secret's token: %s", resp.Status)
			}
		}
	}
	cluster.Wait(t, time.Minute, "what autoscalers follow", func() error {
		var sum float64
		for _, p := range routers {
			v, err := cluster.ReadMetric(client, "http://"+m.at(t, p.name, "8001"), "xpyd_planner_wanted_workers")
			if err != nil {
				return err
			}
			sum += v
		}
		if sum != 2 { // of one router: a worker of each role
			return fmt.Errorf("%v workers wanted", sum)
		}
		return nil
	})
	// A worker whose pod ends says so, and ends by itself.
	procs["xpyd-decode-0"].Signal(syscall.SIGTERM)
	if code := procs["xpyd-decode-0"].Exit(t, 30*time.Second); code != 0 {
		t.Errorf("exit code %d", code)
	}
}
