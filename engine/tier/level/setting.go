package tier

// Setting is a field of Config that what is there at start may not allow.
type Setting string

// The settings.
const (
	HostBytes Setting = "HostBytes"
	Dir       Setting = "Dir"
	DirBytes  Setting = "DirBytes"
	DirIO     Setting = "DirIO"
)

// A SettingError says which setting New cannot do, so that whoever knows where it
// was set can name the place.
type SettingError struct {
	Setting Setting
	Err     error
}

func (e *SettingError) Error() string { return e.Err.Error() }

func (e *SettingError) Unwrap() error { return e.Err }
