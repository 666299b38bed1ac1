package compose

import (
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/xpyd/xpyd/internal/fleet"
	"github.com/xpyd/xpyd/worker"
)

// root of the repository, as compose sees it.
const root = "../.."

// service is what docker-compose.yml says of one.
type service struct {
	Image       string
	Command     []string
	Environment map[string]string
	Volumes     []string
	Ports       []string
	Profiles    []string
	Name        string                                `yaml:"container_name"`
	Grace       time.Duration                         `yaml:"stop_grace_period"`
	ReadOnly    bool                                  `yaml:"read_only"`
	Health      struct{ Test []string }               `yaml:"healthcheck"`
	DependsOn   map[string]struct{ Condition string } `yaml:"depends_on"`
	Deploy      struct {
		Replicas  int
		Resources struct {
			Reservations struct {
				Devices []struct {
					Driver       string
					Count        string
					Capabilities []string
				}
			}
		}
	}
}

func read(t *testing.T, path string, to any) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, path))
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(b, to); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// services reads docker-compose.yml, with its variables at their defaults, and the
// names of its volumes.
func services(t *testing.T) (map[string]service, map[string]any) {
	t.Helper()
	var file struct {
		Services map[string]service
		Volumes  map[string]any
	}
	read(t, "docker-compose.yml", &file)
	variable := regexp.MustCompile(`\$\{[A-Z_]+:-([^}]*)\}`)
	for _, s := range file.Services {
		for i := range s.Command {
			s.Command[i] = variable.ReplaceAllString(s.Command[i], "$1")
		}
		for k := range s.Environment {
			s.Environment[k] = variable.ReplaceAllString(s.Environment[k], "$1")
		}
		for i := range s.Volumes {
			s.Volumes[i] = variable.ReplaceAllString(s.Volumes[i], "$1")
		}
	}
	return file.Services, file.Volumes
}

// checkOurs: a container of ours has the time that its drain takes, and asks its own listener
// whether it is well.
func checkOurs(t *testing.T, name string, s service) {
	t.Helper()
	role := strings.TrimPrefix(name, "gpu-")
	drain := worker.DefaultConfig(fleet.Role(role)).DrainTimeout // a router's is as long
	if s.Grace < drain+5*time.Second {
		t.Errorf("%s is killed after %v, its drain takes up to %v", name, s.Grace, drain)
	}
	var config struct {
		Listen string
		KV     struct{ Sockets string }
	}
	read(t, "configs/compose/"+role+".yaml", &config)
	_, port, _ := net.SplitHostPort(config.Listen)
	if want := []string{"CMD", "xpyd", "health", "http://127.0.0.1:" + port}; !slices.Equal(s.Health.Test, want) {
		t.Errorf("%s is checked by %q, want %q", name, s.Health.Test, want)
	}
	if want := []string{role, "--config", "/etc/xpyd/" + role + ".yaml"}; !slices.Equal(s.Command, want) || !s.ReadOnly {
		t.Errorf("%s runs %q, read only %t", name, s.Command, s.ReadOnly)
	}
	if role == "router" {
		return
	}
	if !slices.Contains(s.Volumes, "sockets:"+config.KV.Sockets) {
		t.Errorf("%s: sockets are in %q, and %v is mounted", name, config.KV.Sockets, s.Volumes)
	}
	devices := s.Deploy.Resources.Reservations.Devices
	if gpu := role != name; gpu != (len(devices) == 1) || gpu != slices.Equal(s.Profiles, []string{"gpu"}) || gpu != (s.Environment["XPYD_DEVICE"] != "") {
		t.Errorf("%s: devices %+v, profiles %v, environment %v", name, devices, s.Profiles, s.Environment)
	}
}

// TestFile: what any number of containers of a service needs, and that what is
// mounted, depended on and scraped is there.
func TestFile(t *testing.T) {
	all, volumes := services(t)
	for _, name := range []string{"nats", "router", "prefill", "decode", "gpu-prefill", "gpu-decode", "prometheus", "grafana"} {
		if _, ok := all[name]; !ok {
			t.Errorf("no service %s", name)
		}
	}
	for name, s := range all {
		if s.Name != "" {
			t.Errorf("%s has a fixed name, %s", name, s.Name)
		}
		for _, v := range s.Volumes {
			from, _, _ := strings.Cut(v, ":")
			_, named := volumes[from]
			if _, err := os.Stat(filepath.Join(root, from)); err != nil && !named {
				t.Errorf("%s mounts what is not there: %v", name, err)
			}
		}
		for d, how := range s.DependsOn {
			if _, ok := all[d]; !ok || how.Condition != "service_healthy" {
				t.Errorf("%s depends on %s, which is not there, or need not be healthy", name, d)
			}
		}
		if len(s.Health.Test) == 0 {
			t.Errorf("%s has no health check", name)
		}
		image, tag, _ := strings.Cut(s.Image, ":")
		if image == "xpyd" {
			checkOurs(t, name, s)
		} else if !regexp.MustCompile(`^v?\d+\.\d+\.\d+`).MatchString(tag) {
			t.Errorf("%s: no version of %s is named", name, s.Image)
		}
	}
	for _, role := range []string{"prefill", "decode"} {
		if s := all[role]; len(s.Ports) > 0 || s.Deploy.Replicas != 2 {
			t.Errorf("%s: ports %v, %d replicas", role, s.Ports, s.Deploy.Replicas)
		}
	}

	var prometheus struct {
		Jobs []struct {
			Name string `yaml:"job_name"`
			Auth struct {
				File string `yaml:"credentials_file"`
			} `yaml:"authorization"`
			DNS []struct {
				Names []string
				Port  string
			} `yaml:"dns_sd_configs"`
		} `yaml:"scrape_configs"`
	}
	read(t, "configs/compose/prometheus.yml", &prometheus)
	key := map[string]string{"router": "admin_listen", "prefill": "listen", "decode": "listen"}
	for _, job := range prometheus.Jobs {
		var config map[string]any
		read(t, "configs/compose/"+job.Name+".yaml", &config)
		addr, _ := config[key[job.Name]].(string)
		host, port, err := net.SplitHostPort(addr)
		if err != nil || host != "0.0.0.0" || len(job.DNS) != 1 || job.DNS[0].Names[0] != job.Name || job.DNS[0].Port != port {
			t.Errorf("job %s scrapes %+v, the service listens on %q", job.Name, job.DNS, addr)
		}
		if want := "/fleet/xpyd/scrape-token"; job.Name != "router" && (job.Auth.File != want || !slices.Contains(all["prometheus"].Volumes, "fleet:/fleet:ro")) {
			t.Errorf("job %s shows %q, not %s", job.Name, job.Auth.File, want)
		}
		delete(key, job.Name)
	}
	if len(key) > 0 {
		t.Errorf("not scraped: %v", key)
	}
	docker, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	if err != nil || !strings.Contains(string(docker), "\nFROM scratch AS cpu\n") {
		t.Errorf("the image needs another: %v\n%s", err, docker)
	}
}
