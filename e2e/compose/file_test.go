package compose

import (
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// root of the repository, as compose sees it.
const root = "../.."

// service is what docker-compose.yml says of one.
type service struct {
	Image       string
	Build       string
	Command     []string
	Environment map[string]string
	Volumes     []string
	Ports       []string
	Name        string   `yaml:"container_name"`
	DependsOn   []string `yaml:"depends_on"`
	Deploy      struct{ Replicas int }
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
	}
	return file.Services, file.Volumes
}

// TestFile: what any number of containers of a service needs, and that what is
// mounted, depended on and scraped is there.
func TestFile(t *testing.T) {
	all, volumes := services(t)
	for _, name := range []string{"nats", "router", "prefill", "decode", "prometheus", "grafana"} {
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
		for _, d := range s.DependsOn {
			if _, ok := all[d]; !ok {
				t.Errorf("%s depends on %s, which is not there", name, d)
			}
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
	if err != nil || !strings.Contains(string(docker), "\nFROM scratch\n") {
		t.Errorf("the image needs another: %v\n%s", err, docker)
	}
}
